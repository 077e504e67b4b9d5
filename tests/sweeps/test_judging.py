"""What paired seeds say of a comparison, what comparisons say of a claim, and whether a run is long enough to speak of it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
from scipy.stats import t as student  # type: ignore[import-untyped]
from scipy.stats import ttest_rel

from experiments import judging
from experiments.claims import Claim, Comparison, Rules, Side
from experiments.judging import AGAINST, HELD, LESS, MISSING, OPEN, UNDECIDED, Outcome, verdict
from experiments.scale import too_short
from fl_bn.app.config import RunConfig
from fl_bn.app.report.cells import Cell as ReportedCell
from tests.listed import listed

ABOVE = Comparison(Side((("A", "x", 0),)), Side((("B", "x", 0),)), paper=(70.0, 60.0))


def outcome(*differences: float, **more: object) -> Outcome:
    return Outcome(ABOVE, tuple(differences), (0.0,) * len(differences), **more)  # type: ignore[arg-type]


HELD_ONE, AGAINST_ONE, OPEN_ONE, NONE = outcome(3.0, 3.1, 2.9), outcome(-3.0, -3.1, -2.9), outcome(9.0, -9.0, 0.0), outcome()
SMALL_ONE, LESS_ONE = replace(HELD_ONE, small="4 % of the paper's steps"), outcome(3.0, -2.0, 1.0)


def test_p_values_and_intervals_are_those_of_scipy() -> None:
    left, right = [61.0, 63.5, 60.2, 64.0], [60.0, 60.5, 61.0, 61.1]
    one = Outcome(ABOVE, tuple(left), tuple(right))
    expected = ttest_rel(left, right)
    interval = expected.confidence_interval()
    assert one.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert (one.mean - one.half, one.mean + one.half) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert one.p != pytest.approx(ttest_rel(left, right[::-1]).pvalue, rel=1e-3)  # pairs matter


SMALL_GAP, LARGE_GAP = (3.0, 3.1, 2.9), (40.0, 41.0, 42.0)
FIVE = {"needed": 5, "collapse": 10.0}  # five seeds decide, and three only a collapse


@listed(
    ("differences", "rules", "state"),
    [
        (SMALL_GAP, {}, HELD),
        ((-3.0, -3.1, -2.9), {}, AGAINST),
        ((3.0, -2.0, 1.0), {}, LESS),
        ((9.0, -9.0, 0.0), {}, OPEN),
        ((), {}, MISSING),
        ((0.1, -0.1, 0.2), {"limit": 2.0}, HELD),
        ((5.0, 5.1, 4.9), {"limit": 2.0}, AGAINST),
        ((1.9, 2.3, 1.7), {"limit": 2.0}, OPEN),
        (SMALL_GAP, FIVE, OPEN),
        ((*SMALL_GAP, 3.0, 3.1), FIVE, HELD),
        (LARGE_GAP, FIVE, HELD),
        (LARGE_GAP[:2], FIVE, OPEN),
    ],
)
def test_what_seeds_decide(differences: tuple[float, ...], rules: dict[str, Any], state: str) -> None:
    """What is smaller than the paper's needs a number of the paper: without one it is undecided."""
    one = outcome(*differences, **rules)
    assert one.state == state
    if not FIVE.items() <= rules.items():
        assert replace(one, comparison=replace(ABOVE, paper=None, figure="3")).state == (OPEN if state == LESS else state)


def test_verdicts() -> None:
    """Contradictions first; mostly reproduced needs more than half; one that held among many is not enough."""
    claim = Claim("000-T1", "Table 1", "A is ahead", compare=(ABOVE,))
    cases: list[tuple[tuple[Outcome, ...], str]] = [
        ((HELD_ONE, HELD_ONE), judging.REPRODUCED),
        ((HELD_ONE, HELD_ONE, OPEN_ONE), "mostly reproduced (2 of 3)"),
        ((LESS_ONE, LESS_ONE, HELD_ONE), "smaller than the paper's (2 of 3)"),
        ((HELD_ONE, OPEN_ONE), UNDECIDED),
        ((HELD_ONE, HELD_ONE, AGAINST_ONE), "contradicted (1 of 3)"),
        ((SMALL_ONE, SMALL_ONE), judging.NOT_AT_SCALE),
        ((HELD_ONE, NONE), UNDECIDED),
        ((NONE, NONE), judging.NOT_RUN),
    ]
    for outcomes, expected in cases:
        assert verdict(claim, outcomes) == expected
    assert verdict(replace(claim, untestable="no data"), []) == judging.UNTESTABLE
    assert verdict(replace(claim, exact="tests/x.py"), []) == "reproduced (exactly)"


def test_seeds_that_divide_the_same_samples_have_the_variance_of_nadeau_and_bengio() -> None:
    """The closed form: stdev * sqrt(1 / n + test / train)."""
    values = (1.0, 4.5, 2.5, 3.0, -1.0)
    one, error = outcome(*values, resampled=0.25), stdev(values) * math.sqrt(1 / 5 + 0.25)
    assert one.p == pytest.approx(2 * student.sf(2.0 / error, 4), rel=1e-9)
    assert one.half == pytest.approx(student.ppf(0.975, 4) * error, rel=1e-9)
    assert one.detectable == pytest.approx(outcome(*values).detectable * 1.5, rel=1e-9)  # sqrt(0.45 / 0.2)


RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
FLAT = [0.5] * 10


def cell(curve: list[float], **config: Any) -> ReportedCell:
    keys = {"rounds": 100, "local-steps": 10, "learning-rate-schedule": "constant", **{k.replace("_", "-"): v for k, v in config.items()}}
    step = keys["rounds"] // len(curve)
    rows = tuple({"round": step * n, "accuracy": value} for n, value in enumerate(curve, 1))
    return ReportedCell("one", {}, {**RunConfig().to_mapping(), **keys}, "finished", rows=rows)


def short(one: ReportedCell, **claim: Any) -> str:
    return too_short([one], Claim("000-T1", "Table 1", "c", **claim), Rules())


MILESTONES = {"learning_rate_schedule": "milestones", "learning_rate_milestones": "0.5:0.1, 0.9:0.01"}
STEP = {"learning_rate_schedule": "step"}
IN_A_PHASE = "of the paper's steps per client in a phase of the schedule"


@listed(
    ("config", "claim", "why"),
    [
        ({}, {"steps": (3000.0,)}, ""),  # 1,000 of 3,000
        ({}, {"steps": (3100.0,)}, "32 % of the paper's steps per client"),
        ({"local_steps": 0, "local_epochs": 2}, {"epochs": (1000.0,)}, "20 % of the paper's epochs per client"),
        ({"batch_size": 10}, {"samples": (100_000.0,)}, "10 % of the paper's samples per client"),
        (MILESTONES, {"steps": (500.0, 400.0, 1000.0)}, f"10 % {IN_A_PHASE}"),  # long enough in all, but the last phase is not
        (STEP, {"steps": (1600.0, 800.0, 800.0)}, f"31 % {IN_A_PHASE}"),
    ],
)
def test_a_third_of_the_training_is_enough_in_every_phase(config: dict[str, Any], claim: dict[str, Any], why: str) -> None:
    assert short(cell(RISING, **config), **claim) == why


@listed(
    ("curve", "config", "enough"),
    [
        (FLAT, {"learning_rate_schedule": "exponential", "learning_rate_decay": 0.998}, True),
        ([*FLAT[:8], 0.5, 0.52], {}, False),  # it gains in the last fifth
        (FLAT, {"learning_rate_schedule": "cosine"}, False),  # the rate has ended it
        ([0.1, 0.2, 0.3, 0.4, *FLAT[:6]], STEP, False),  # the last phase is flat, the first is not
    ],
)
def test_a_flat_curve_is_enough_unless_the_rate_has_ended_it(curve: list[float], config: dict[str, Any], enough: bool) -> None:
    assert (short(cell(curve, **config), steps=(99999.0,) * (3 if config == STEP else 1)) == "") == enough
