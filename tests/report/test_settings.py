"""What [report], [paper] and [notes] may say, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path

from tests.listed import listed
from tests.refusals import naming
from tests.report.inner import ConfigError, read_settings
from tests.report.made_up import sweep


def test_everything_said(tmp_path: Path) -> None:
    text = """
        [run]
        seed = [0, 1]
        [axes.method]
        "+BN" = {}
        GN = {}
        [variants.small.axes.method]
        tiny = {}
        [report]
        title = "of the report"
        rows = "method"
        columns = ["split", "byzantine"]
        metric = "test-loss"
        at = "best"
        x = ["bytes", "local-steps"]
        against = "byzantine"
        domains = true
        [paper]
        source = "Table 3"
        numbers = { "+BN" = { "1 class, 3" = 45, "2" = "4.5" } }
        [notes]
        text = "smaller"
    """
    found = read_settings(sweep(tmp_path, text))
    assert (found.title, found.rows, found.columns) == ("of the report", "method", ("split", "byzantine"))
    assert (found.metric, found.at, found.x, found.against) == ("test-loss", "best", ("bytes", "local-steps"), ("byzantine",))
    assert found.domains == "each"
    assert (found.paper.source, found.notes) == ("Table 3", "smaller")
    assert found.paper.numbers == {"+BN": {"1 class, 3": "45", "2": "4.5"}}
    assert found.order == {"seed": ["0", "1"], "method": ["+BN", "GN", "tiny"]}


@listed(
    ("text", "message"),
    [
        ("[report", "TOML"),
        ("[report]\nmetrik = 'accuracy'", "'metrik'"),
        ("[report]\nat = 'first'", "'first'"),
        ("[report]\nx = ['rounds']", "'round'"),
        ("[report]\napart = 3", "apart"),
        ("[report]\nrows = ['method']", "rows"),
        ("[report]\ndomains = 1.5", "domains"),
        ("[paper]\nnumbers = { BN = '45' }", "numbers"),
        ("[paper]\nnumber = {}", "'number'"),
        ("report = 3", "report"),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with naming(message, ConfigError) as refused:
        read_settings(sweep(tmp_path, text))
    assert "sweep.toml" in str(refused.value)


def test_a_sweep_of_an_earlier_version_is_still_reported(tmp_path: Path) -> None:
    """Its report had further pictures. Control: another key is refused."""
    text = "[report]\nrows = 'method'\nboxplot = true\nper-class = true\ndrift = true\nheat = { x = 'a', y = 'b' }"
    assert read_settings(sweep(tmp_path, text)).rows == "method"
    with naming("'boxplots'", ConfigError):
        read_settings(sweep(tmp_path, text.replace("boxplot", "boxplots")))
