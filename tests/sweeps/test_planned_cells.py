"""No cell that waits for its run belongs to a claim that the run could not decide, by the register's own rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.catalogue import FOLDER
from experiments.claims import LEAST, Claim, Comparison, Rules, read_register
from experiments.evidence import NOWHERE, Runs, gather
from experiments.kept import Kept, own_config
from experiments.scale import too_short
from fl_bn.app.report.page import report_of
from fl_bn.app.report.settings import SEED

RULES = read_register(FOLDER).rules


def undecidable(comparison: Comparison, runs: Runs, claim: Claim, rules: Rules = RULES) -> str:
    """Return why the planned runs cannot decide a comparison; empty if they can."""
    planned = [Kept(cell.config.name, cell.axes, own_config(cell.config), "", 0.0, ()).shown() for cell in runs.defined]
    places = report_of(runs.settings, planned, NOWHERE).layout.groups
    large = comparison.gap is not None and abs(comparison.gap) > rules.collapse
    for row, column, _ in (*comparison.left.places, *comparison.right.places):
        cells = places.get((row, column), ())
        seeds = len({cell.at(SEED) for cell in cells})
        if seeds < (LEAST if large else rules.seeds):
            return f"{row}, {column}: {seeds} seeds"
        if short := too_short(cells, claim, rules):
            return f"{row}, {column}: {short}"
    return ""


@pytest.mark.slow
def test_every_planned_cell_belongs_to_a_claim_that_it_can_decide() -> None:
    tested = [one for one in gather(Path("experiments")) if one.runs and not one.claim.untestable]
    waiting = [one for one in tested if one.runs.missing]
    reasons = {(one.claim.id, o.comparison.left): undecidable(o.comparison, one.runs, one.claim) for one in waiting for o in one.outcomes}
    assert not {place: reason for place, reason in reasons.items() if reason}
    short = next(one for one in tested if one.claim.id == "002-T2")  # control: run at 3.6 % of the paper's length, before the rule
    assert "samples per client" in undecidable(short.outcomes[0].comparison, short.runs, short.claim, Rules(seeds=3))
    assert "seeds" in undecidable(short.outcomes[0].comparison, short.runs, short.claim, Rules(seeds=99))
