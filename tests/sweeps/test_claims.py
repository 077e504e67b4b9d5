"""The register of claims: what stands in it, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER
from experiments.claims import FILE, Register, parse_register, read_register
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.evidence_runs import CLAIMS
from tests.sweeps.inner import ConfigError

ROOT = Path(__file__).parents[2]
PLACE = {"left": ["A", "x"], "right": ["B", "x"]}


@pytest.fixture(scope="module")
def ours() -> Register:
    """What the repository has."""
    return read_register(FOLDER)


def register(*compare: dict[str, Any], **more: Any) -> Register:
    return parse_register({"claims": [{"id": "000-T1", "place": "Table 1; l. 3", "claim": "c", "compare": list(compare), **more}]})


def test_every_claim_of_ours_has_its_place_and_its_number(ours: Register) -> None:
    for one in ours.claims:
        assert re.fullmatch(r"00[0-4]-[TFS]\w+(-\w+)?", one.id), one.id
        assert re.match(r"(Tables?|Figures?|section|appendix) .*\bl\. \d", one.place), one.id
        assert not one.exact or (ROOT / one.exact).is_file()  # a test shows it
        for comparison in one.compare:
            assert comparison.paper or comparison.figure, comparison
            assert not comparison.near or comparison.gap is not None or comparison.margin is not None, comparison
    assert all(one.id.startswith("own-") for one in ours.own)
    words = [text for one in ours.own for text in (one.yes, one.no)] + [one.cause for one in ours.claims]
    assert [text for text in words if re.search(r"\d", text)] == []  # numbers come from results


@listed(
    ("compare", "more", "message"),
    [
        ([PLACE], {}, "LEFT"),
        ([{**PLACE, "near": True, "figure": "3"}], {}, "'near'"),
        ([{**PLACE, "paper": [1, 2], "within": 3}], {}, "'within'"),
        ([{**PLACE, "paper": [1, 2], "figure": "3"}], {}, "LEFT"),
        ([{**PLACE, "paper": [1]}], {}, "comparison"),
        ([{**PLACE, "left": ["A", "x", -1], "paper": [1, 2]}], {}, "comparison"),
        ([{**PLACE, "paper": [1, 2], "than": 3}], {}, "'than'"),
        ([{**PLACE, "paper": [1, 2], "near": 1}], {}, "comparison"),
        ([], {}, "'compare'"),
        ([{**PLACE, "paper": [1, 2]}], {"id": "own-x"}, "figure"),
        ([{**PLACE, "paper": [1, 2]}], {"step": [1]}, "'step'"),
        ([{**PLACE, "paper": [1, 2]}], {"steps": [0]}, "steps"),
        ([{**PLACE, "paper": [1, 2]}], {"resampled": -1}, "resampled"),
        ([{**PLACE, "paper": [1, 2]}], {"headline": 2}, "headline"),
    ],
)
def test_a_wrong_claim_is_named(compare: list[dict[str, Any]], more: dict[str, Any], message: str) -> None:
    with naming(message, ConfigError):
        register(*compare, **more)
    register({**PLACE, "paper": [1, 2]})  # control


OWN = {"id": "own-x", "explains": "X-1", "asks": "?", "compare": [PLACE]}
KNOWN = tomllib.loads(CLAIMS)


@listed(
    ("tables", "word"),
    [
        ({"claim": []}, "'claim'"),
        ({"claims": KNOWN["claims"] * 2}, "X-1"),
        ({**KNOWN, "own": [{**OWN, "explains": "X-2"}]}, "'X-2'"),
        ({**KNOWN, "own": [{**OWN, "id": "x"}]}, "'own-'"),
        ({"claims": [{"id": "X-1", "untestable": "no"}]}, "key"),
    ],
)
def test_a_wrong_register_is_named(tables: dict[str, Any], word: str, tmp_path: Path) -> None:
    with naming(word, ConfigError):
        parse_register(tables)
    with naming("register", ConfigError):
        read_register(tmp_path)
    (tmp_path / FILE).write_text(CLAIMS)
    assert [one.id for one in read_register(tmp_path).claims] == ["X-1"]  # control
