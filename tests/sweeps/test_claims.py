"""The register of claims: what stands in it, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from experiments.catalogue import FOLDER
from experiments.claims import parse_register, read_register
from fl_bn.app.config import ConfigError
from tests.listed import listed
from tests.refusals import naming
from tests.sweeps.evidence_runs import CLAIMS

ROOT = Path(__file__).parents[2]


def test_every_claim_of_ours_has_its_place_and_its_number() -> None:
    ours = read_register(FOLDER)
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


PLACE: dict[str, Any] = {"left": ["A", "x"], "right": ["B", "x"]}
KNOWN = tomllib.loads(CLAIMS)
OWN = {"id": "own-x", "explains": "X-1", "asks": "?", "compare": [PLACE]}


def claim(*compare: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"claims": [{"id": "000-T1", "place": "Table 1; l. 3", "claim": "c", "compare": list(compare), **more}]}


@listed(
    ("tables", "word"),
    [
        (claim(PLACE), "LEFT"),
        (claim({**PLACE, "near": True, "figure": "3"}), "'near'"),
        (claim({**PLACE, "paper": [1, 2], "within": 3}), "'within'"),
        (claim({**PLACE, "paper": [1, 2], "than": 3}), "'than'"),
        (claim(), "'compare'"),
        (claim({**PLACE, "paper": [1, 2]}, id="own-x"), "figure"),
        (claim({**PLACE, "paper": [1, 2]}, steps=[0]), "steps"),
        (claim({**PLACE, "paper": [1, 2]}, headline=2), "headline"),
        ({"claims": KNOWN["claims"] * 2}, "X-1"),
        ({**KNOWN, "own": [{**OWN, "explains": "X-2"}]}, "'X-2'"),
        ({**KNOWN, "own": [{**OWN, "id": "x"}]}, "'own-'"),
    ],
)
def test_a_wrong_entry_is_named(tables: dict[str, Any], word: str) -> None:
    with naming(word, ConfigError):
        parse_register(tables)
    parse_register({**KNOWN, **claim({**PLACE, "paper": [1, 2]})})  # control
