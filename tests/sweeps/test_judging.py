"""What paired seeds say of a comparison, what comparisons say of a claim, and whether a run is long enough to speak of it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
from scipy.stats import t as student  # type: ignore[import-untyped]
from scipy.stats import ttest_1samp, ttest_rel

from experiments.claims import Claim, Rules
from experiments.judging import (
    AGAINST,
    HELD,
    LESS,
    MISSING,
    NOT_AT_SCALE,
    NOT_RUN,
    OPEN,
    REPRODUCED,
    SMALL,
    UNDECIDED,
    UNTESTABLE,
    Outcome,
    verdict,
)
from experiments.scale import phases, too_short
from tests.listed import listed
from tests.sweeps.evidence_runs import ABOVE
from tests.sweeps.inner import ReportedCell, RunConfig


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


@listed(
    ("limit", "differences", "state"),
    [
        (None, (3.0, 3.1, 2.9), HELD),
        (None, (-3.0, -3.1, -2.9), AGAINST),
        (None, (3.0, -2.0, 1.0), LESS),
        (None, (9.0, -9.0, 0.0), OPEN),
        (None, (30.0,), OPEN),
        (None, (), MISSING),
        (2.0, (0.1, -0.1, 0.2), HELD),
        (2.0, (5.0, 5.1, 4.9), AGAINST),
        (2.0, (1.9, 2.3, 1.7), OPEN),
        (2.0, (-1.0, -1.0, -1.0), HELD),
    ],
)
def test_what_seeds_decide(limit: float | None, differences: tuple[float, ...], state: str) -> None:
    """What is smaller than the paper's needs a number of the paper: without one it is undecided."""
    one = outcome(*differences, limit=limit)
    assert one.state == state
    assert replace(one, comparison=replace(ABOVE, paper=None, figure="3")).state == (OPEN if state == LESS else state)


def test_five_seeds_decide_and_three_only_a_collapse() -> None:
    """Controls: with five seeds the small difference is decided; without a bound for collapses the large one is not."""
    small, large = (3.0, 3.1, 2.9), (40.0, 41.0, 42.0)
    assert outcome(*small, needed=5, collapse=10.0).state == OPEN
    assert outcome(*small, 3.0, 3.1, needed=5, collapse=10.0).state == HELD
    assert outcome(*large, needed=5, collapse=10.0).state == HELD
    assert outcome(*(-value for value in large), needed=5, collapse=10.0).state == AGAINST
    assert outcome(*large, needed=5).state == OPEN
    assert outcome(*large[:2], needed=5, collapse=10.0).state == OPEN


def test_verdicts() -> None:
    """Contradictions first; mostly reproduced needs more than half; one that held among many is not enough."""
    claim = Claim("000-T1", "Table 1", "A is ahead", compare=(ABOVE,))
    cases: list[tuple[tuple[Outcome, ...], str]] = [
        ((HELD_ONE, HELD_ONE), REPRODUCED),
        ((HELD_ONE, HELD_ONE, OPEN_ONE), "mostly reproduced (2 of 3)"),
        ((LESS_ONE, LESS_ONE, HELD_ONE), "smaller than the paper's (2 of 3)"),
        ((LESS_ONE, OPEN_ONE), UNDECIDED),
        ((HELD_ONE, OPEN_ONE), UNDECIDED),
        ((HELD_ONE, HELD_ONE, AGAINST_ONE), "contradicted (1 of 3)"),
        ((HELD_ONE, *(AGAINST_ONE,) * 15), "contradicted (15 of 16)"),
        ((SMALL_ONE, SMALL_ONE), NOT_AT_SCALE),
        ((HELD_ONE, HELD_ONE, SMALL_ONE), "mostly reproduced (2 of 3)"),
        ((HELD_ONE, NONE), UNDECIDED),
        ((NONE, NONE), NOT_RUN),
    ]
    for outcomes, expected in cases:
        assert verdict(claim, outcomes) == expected
    assert (SMALL_ONE.state, SMALL_ONE.tested, replace(NONE, small="short").state) == (SMALL, HELD, MISSING)  # too short decides nothing
    assert verdict(replace(claim, untestable="no data"), []) == UNTESTABLE
    assert verdict(replace(claim, exact="tests/x.py"), []) == "reproduced (exactly)"


def test_seeds_that_divide_the_same_samples_have_the_variance_of_nadeau_and_bengio() -> None:
    """The closed form: stdev * sqrt(1 / n + test / train). Control: 0, which is the test of scipy."""
    values = (1.0, 4.5, 2.5, 3.0, -1.0)
    plain, one = outcome(*values), outcome(*values, resampled=0.25)
    error, quantile = stdev(values) * math.sqrt(1 / 5 + 0.25), student.ppf(0.975, 4)
    assert one.p == pytest.approx(2 * student.sf(2.0 / error, 4), rel=1e-9)
    assert one.half == pytest.approx(quantile * error, rel=1e-9)
    assert one.detectable == pytest.approx(plain.detectable * 1.5, rel=1e-9)  # sqrt(0.45 / 0.2)
    assert plain.p == pytest.approx(ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert (plain.half, one.half) == pytest.approx((quantile * stdev(values) / math.sqrt(5), 1.5 * plain.half), rel=1e-9)


RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
FLAT = [0.5] * 10


def cell(curve: list[float], **config: Any) -> ReportedCell:
    keys = {"rounds": 100, "local-steps": 10, "learning-rate-schedule": "constant", **{k.replace("_", "-"): v for k, v in config.items()}}
    step = keys["rounds"] // len(curve)
    rows = tuple({"round": step * n, "accuracy": value} for n, value in enumerate(curve, 1))
    return ReportedCell("one", {}, {**RunConfig().to_mapping(), **keys}, "finished", rows=rows)


def short(one: ReportedCell, **claim: Any) -> str:
    return too_short([one], Claim("000-T1", "Table 1", "c", **claim), Rules())


def test_a_third_of_the_steps_is_enough() -> None:
    assert short(cell(RISING), steps=(3000.0,)) == ""  # 1,000 of 3,000
    assert short(cell(RISING), steps=(3100.0,)) == "32 % of the paper's steps per client"
    assert short(cell(RISING, fraction=0.5), steps=(3000.0,)) == "17 % of the paper's steps per client"
    assert short(cell(RISING)) == ""  # a claim that is not of converged accuracy


def test_every_phase_of_the_schedule_needs_its_share() -> None:
    """As long as the paper's in all, but the last phase is not. Control: the paper's own shares."""
    milestones = {"learning_rate_schedule": "milestones", "learning_rate_milestones": "0.5:0.1, 0.9:0.01"}
    in_a_phase = "of the paper's steps per client in a phase of the schedule"
    assert phases(RunConfig(**milestones)) == [50, 90, 100]
    assert short(cell(RISING, **milestones), steps=(500.0, 400.0, 1000.0)) == f"10 % {in_a_phase}"
    assert short(cell(RISING, **milestones), steps=(500.0, 400.0, 100.0)) == ""
    assert short(cell(RISING, learning_rate_schedule="step"), steps=(1600.0, 800.0, 800.0)) == f"31 % {in_a_phase}"


def test_a_flat_curve_is_enough() -> None:
    """Control: one that gains in the last fifth."""
    assert short(cell(FLAT, learning_rate_schedule="exponential", learning_rate_decay=0.998), steps=(99999.0,)) == ""
    assert short(cell([*FLAT[:8], 0.5, 0.52]), steps=(99999.0,)) != ""
    assert short(cell([0.1, *FLAT[1:]]), steps=(99999.0,)) == ""


def test_a_curve_that_the_rate_has_ended_is_not_flat() -> None:
    """A cosine ends at 0, and an exponential can. A step's last phase is flat, its first is not."""
    assert short(cell(FLAT, learning_rate_schedule="cosine"), steps=(99999.0,)) != ""
    assert short(cell(FLAT, learning_rate_schedule="exponential", learning_rate_decay=0.9), steps=(99999.0,)) != ""
    steep = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert short(cell(steep, learning_rate_schedule="step"), steps=(9e4, 9e4, 9e4)) != ""
