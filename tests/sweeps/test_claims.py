"""The register of claims: what stands in it, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER
from experiments.claims import FILE, Comparison, Register, Side, parse_register, read_register
from fl_bn.run.config import ConfigError
from tests.listed import listed
from tests.sweeps.evidence_runs import CLAIMS

ROOT = Path(__file__).parents[2]
PLACE = {"left": ["A", "x"], "right": ["B", "x"]}


@pytest.fixture(scope="module")
def ours() -> Register:
    """What the repository has."""
    return read_register(FOLDER)


def register(*compare: dict[str, Any], **more: Any) -> Register:
    return parse_register({"claims": [{"id": "000-T1", "place": "Table 1; l. 3", "claim": "c", "compare": list(compare), **more}]})


# The repository's own


def test_every_claim_is_a_table_or_figure_of_a_paper_with_its_place(ours: Register) -> None:
    for one in ours.claims:
        assert re.fullmatch(r"00[0-4]-[TFS]\w+(-\w+)?", one.id), one.id
        assert re.match(r"(Tables?|Figures?|section|appendix) ", one.place), one.id
        assert re.search(r"\bl\. \d", one.place), one.id
        assert not one.claim.endswith("."), one.id
    assert all(one.id.startswith("own-") for one in ours.own)


def test_no_claim_lacks_its_number_or_its_figure(ours: Register) -> None:
    compared = [comparison for one in ours.claims for comparison in one.compare]
    assert len(compared) > 80
    assert [str(one) for one in compared if not one.paper and not one.figure] == []
    assert [str(one) for one in compared if one.near and one.gap is None and one.margin is None] == []


def test_nothing_is_said_not_to_be_at_hand() -> None:
    files = [*FOLDER.glob("*.toml"), ROOT / "experiments" / "EVIDENCE.md"]
    assert len(files) > 50
    assert [file.name for file in files if "at hand" in file.read_text(encoding="utf-8")] == []


def test_no_experiment_states_a_claim_of_its_own() -> None:
    assert [file.name for file in FOLDER.glob("*.toml") if "evidence" in tomllib.loads(file.read_text(encoding="utf-8"))] == []


def test_words_about_causes_state_no_number(ours: Register) -> None:
    texts = [text for one in ours.own for text in (one.yes, one.no)] + [one.cause for one in ours.claims]
    assert [text for text in texts if re.search(r"\d", text)] == []


def test_a_claim_that_is_reproduced_exactly_names_a_test(ours: Register) -> None:
    exact = [one.exact for one in ours.claims if one.exact]
    assert exact
    assert all((ROOT / file).is_file() for file in exact)


# What may stand in it


def test_the_sides_of_a_comparison_in_words() -> None:
    gains = Comparison(Side((("A", "x", 0), ("B", "x", 0))), Side((("A", "y", 0), ("B", "y", 0))), figure="3")
    assert str(gains) == "A less B (x) > A less B (y)"
    assert str(Comparison(Side((("A", "x", 16),)), Side((("A", "x", 128),)), metric="loss")) == "loss: A (x, round 16) > A (x, round 128)"
    assert str(Comparison(Side((("A", "x", 0),)), Side((("B", "x", 0),)), near=True, paper=(1, 2))) == "A near B (x)"


def test_near_is_the_papers_own_gap_and_a_margin() -> None:
    (one,) = register({**PLACE, "near": True, "paper": [87.66, 91.53]}).claims[0].compare
    assert one.limit(1.0) == pytest.approx(4.87)
    (one,) = register({**PLACE, "near": True, "paper": [87.66, 91.53], "margin": 0.5}).claims[0].compare
    assert one.limit(1.0) == pytest.approx(4.37)
    (one,) = register({**PLACE, "near": True, "figure": "3", "margin": 2.0}).claims[0].compare
    assert one.limit(1.0) == 2.0
    (one,) = register({**PLACE, "paper": [2, 1]}).claims[0].compare
    assert one.limit(1.0) is None


@listed(
    ("compare", "more", "message"),
    [
        ([PLACE], {}, r"give the paper's numbers as paper = \[LEFT, RIGHT\], or figure"),
        ([{**PLACE, "near": True, "figure": "3"}], {}, "'near' needs the paper's two numbers"),
        ([{**PLACE, "paper": [1, 2], "within": 3}], {}, "'within' is only for questions in"),
        ([{**PLACE, "paper": [1, 2], "figure": "3"}], {}, r"give the paper's numbers as paper = \[LEFT, RIGHT\], or figure"),
        ([{**PLACE, "paper": [1]}], {}, "a comparison is"),
        ([{**PLACE, "left": ["A"], "paper": [1, 2]}], {}, "a comparison is"),
        ([{**PLACE, "left": ["A", "x", -1], "paper": [1, 2]}], {}, "a comparison is"),
        ([{**PLACE, "paper": [1, 2], "than": 3}], {}, "key 'than'"),
        ([{**PLACE, "paper": [1, 2], "near": 1}], {}, "a comparison is"),
        ([], {}, "needs one of the keys 'compare' .comparisons., 'untestable'"),
        ([{**PLACE, "paper": [1, 2]}], {"id": "own-x"}, "must name a table or figure of the paper"),
        ([{**PLACE, "paper": [1, 2]}], {"step": [1]}, "key 'step': did you mean 'steps'"),
        ([{**PLACE, "paper": [1, 2]}], {"steps": [0]}, "steps must be a list of numbers above 0"),
        ([{**PLACE, "paper": [1, 2]}], {"resampled": -1}, "resampled must be a number >= 0"),
        ([{**PLACE, "paper": [1, 2]}], {"headline": 2}, "headline must be 1..1, but got 2"),
    ],
)
def test_a_wrong_claim_is_named(compare: list[dict[str, Any]], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register(*compare, **more)
    register({**PLACE, "paper": [1, 2]})  # control


def test_a_wrong_register_is_named(tmp_path: Path) -> None:
    tables = tomllib.loads(CLAIMS)
    with pytest.raises(ConfigError, match="table 'claim'"):
        parse_register({"claim": []})
    with pytest.raises(ConfigError, match="several entries have X-1"):
        parse_register({"claims": tables["claims"] * 2})
    own = {"id": "own-x", "explains": "X-2", "asks": "?", "compare": [PLACE]}
    with pytest.raises(ConfigError, match="explains the claim 'X-2', which does not exist"):
        parse_register({**tables, "own": [own]})
    with pytest.raises(ConfigError, match="needs an id that begins with 'own-'"):
        parse_register({**tables, "own": [{**own, "id": "x", "explains": "X-1"}]})
    with pytest.raises(ConfigError, match="lacks a key"):
        parse_register({"claims": [{"id": "X-1", "untestable": "no"}]})
    with pytest.raises(ConfigError, match="cannot be read as the register of claims"):
        read_register(tmp_path)
    (tmp_path / FILE).write_text(CLAIMS)
    assert [one.id for one in read_register(tmp_path).claims] == ["X-1"]
