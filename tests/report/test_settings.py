"""What [report], [paper] and [notes] may say, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_bn.report.settings import Heat, Settings, read_settings
from fl_bn.run.config import ConfigError
from tests.listed import listed
from tests.report.made_up import sweep


def test_nothing_said_is_a_report_with_defaults(tmp_path: Path) -> None:
    found = read_settings(sweep(tmp_path / "fixbn"))
    assert found == Settings("fixbn", text="")
    assert (found.metric, found.at, found.x, found.columns) == ("", "last", ("round",), None)


def test_everything_said(tmp_path: Path) -> None:
    text = """
        title = "of the sweep"
        [run]
        seed = [0, 1]
        byzantine = [3, 1]
        [axes.method]
        "+BN" = {}
        GN = {}
        [variants.small.axes.method]
        tiny = {}
        [variants.smaller]
        axes.method = ["GN"]
        [report]
        title = "of the report"
        rows = "method"
        columns = ["split", "byzantine"]
        metric = "test-loss"
        at = "best"
        x = ["bytes", "local-steps"]
        against = "byzantine"
        heat = { x = "byzantine", y = "split", value = "+BN", minus = "GN" }
        boxplot = true
        per-class = true
        drift = true
        [paper]
        source = "Table 3"
        note = " here "
        numbers = { "+BN" = { "1 class, 3" = 45, "2" = "4.5" } }
        [notes]
        text = "smaller"
        [experiment]
        anything = 1
    """
    found = read_settings(sweep(tmp_path, text))
    assert (found.title, found.rows, found.columns) == ("of the report", "method", ("split", "byzantine"))
    assert (found.metric, found.at, found.x, found.against) == ("test-loss", "best", ("bytes", "local-steps"), ("byzantine",))
    assert found.heat == Heat("byzantine", "split", "+BN", "GN")
    assert found.boxplot
    assert found.per_class
    assert found.drift
    assert (found.paper.source, found.paper.note, found.notes) == ("Table 3", "here", "smaller")
    assert found.paper.numbers == {"+BN": {"1 class, 3": "45", "2": "4.5"}}
    assert found.order == {"seed": ["0", "1"], "byzantine": ["3", "1"], "method": ["+BN", "GN", "tiny"]}
    assert found.text == text


@listed(
    ("text", "message"),
    [
        ("[report", "is not a TOML file"),
        ("[report]\nmetrik = 'accuracy'", "unknown key 'metrik' in .report.: did you mean 'metric'"),
        ("[report]\nat = 'first'", "at must be one of last, best, but got 'first'"),
        ("[report]\nx = ['rounds']", "did you mean 'round'"),
        ("[report]\napart = 3", "apart must be a list of texts, but got 3"),
        ("[report]\nx = 3", "x must be a list of texts, but got 3"),
        ("[report]\nrows = ['method']", "rows must be a text"),
        ("[report]\nboxplot = 1", "boxplot must be true or false"),
        ("[report]\nheat = { x = 'a' }", "heat needs two axes, x and y"),
        ("[report]\nheat = { x = 'a', y = 'a' }", "heat needs two axes"),
        ("[report]\nheat = { x = 'a', y = 'b', minus = 'c' }", "minus='c' is subtracted from value, which is missing"),
        ("[report]\nheat = { x = 'a', y = 'b', values = 'c' }", "unknown key 'values' in heat: did you mean 'value'"),
        ("[report]\nheat = 'method'", "heat must be a table"),
        ("[paper]\nnumbers = { BN = '45' }", "numbers must be"),
        ("[paper]\nnumber = {}", "unknown key 'number' in .paper."),
        ("report = 3", "report must be a table, but got 3"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        read_settings(sweep(tmp_path, text))
    assert "sweep.toml" in str(refused.value)


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a sweep, since it has no sweep.toml"):
        read_settings(tmp_path)
