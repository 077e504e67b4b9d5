"""What paired seeds say of a comparison, and what comparisons say of a claim."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
from scipy.stats import t as student  # type: ignore[import-untyped]
from scipy.stats import ttest_1samp, ttest_rel

from experiments.claims import Claim, Own
from experiments.judging import (
    AGAINST,
    HELD,
    LESS,
    LEVEL,
    MISSING,
    NOT_AT_SCALE,
    NOT_RUN,
    OPEN,
    POWER,
    REPRODUCED,
    SMALL,
    UNDECIDED,
    UNTESTABLE,
    Outcome,
    answer,
    reasons,
    verdict,
)
from tests.listed import listed
from tests.sweeps.evidence_runs import ABOVE


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
        (None, (3.0, 3.1), OPEN),
        (None, (0.0, 0.0, 0.0), LESS),
        (None, (), MISSING),
        (2.0, (0.1, -0.1, 0.2), HELD),
        (2.0, (5.0, 5.1, 4.9), AGAINST),
        (2.0, (-5.0, -5.1, -4.9), AGAINST),
        (2.0, (1.9, 2.3, 1.7), OPEN),
        (2.0, (-1.0, -1.0, -1.0), HELD),
        (2.0, (-1.0, -1.0), OPEN),
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


def test_a_run_that_is_too_short_decides_nothing_whatever_the_test_says() -> None:
    assert SMALL_ONE.state == SMALL
    assert SMALL_ONE.tested == HELD
    assert replace(NONE, small="short").state == MISSING


def test_verdicts() -> None:
    """Contradictions first; mostly reproduced needs more than half; one that held among many is not enough."""
    claim = Claim("000-T1", "Table 1", "A is ahead", compare=(ABOVE,))
    cases: list[tuple[tuple[Outcome, ...], str]] = [
        ((HELD_ONE, HELD_ONE), REPRODUCED),
        ((HELD_ONE, HELD_ONE, OPEN_ONE), "mostly reproduced (2 of 3)"),
        ((HELD_ONE, HELD_ONE, LESS_ONE), "mostly reproduced (2 of 3)"),
        ((LESS_ONE, LESS_ONE, HELD_ONE), "smaller than the paper's (2 of 3)"),
        ((LESS_ONE, OPEN_ONE), UNDECIDED),
        ((HELD_ONE, OPEN_ONE), UNDECIDED),
        ((HELD_ONE, HELD_ONE, AGAINST_ONE), "contradicted (1 of 3)"),
        ((OPEN_ONE, AGAINST_ONE), "contradicted (1 of 2)"),
        ((HELD_ONE, *(AGAINST_ONE,) * 15), "contradicted (15 of 16)"),
        ((SMALL_ONE, SMALL_ONE), NOT_AT_SCALE),
        ((SMALL_ONE, OPEN_ONE), NOT_AT_SCALE),
        ((HELD_ONE, HELD_ONE, SMALL_ONE), "mostly reproduced (2 of 3)"),
        ((AGAINST_ONE, SMALL_ONE), "contradicted (1 of 2)"),
        ((outcome(9.0), NONE), UNDECIDED),
        ((HELD_ONE, NONE), UNDECIDED),
        ((NONE, NONE), NOT_RUN),
    ]
    for outcomes, expected in cases:
        assert verdict(claim, outcomes) == expected
    assert verdict(replace(claim, untestable="no data"), []) == UNTESTABLE
    assert verdict(replace(claim, exact="tests/x.py"), []) == "reproduced (exactly)"


def test_reasons_say_why_comparisons_are_not_decided() -> None:
    few = outcome(1.0, 1.1, 1.2, needed=5)
    coarse = outcome(90.0, -90.0, 1.0)  # the paper's own ten points would not be seen
    assert coarse.too_coarse
    assert not OPEN_ONE.too_coarse or OPEN_ONE.detectable > 10
    said = reasons([HELD_ONE, few, few, coarse, SMALL_ONE, NONE])
    assert said == [
        "3 of 5 seeds (2 of 6)",
        "a difference as small as the paper's would not have been seen (1 of 6)",
        "4 % of the paper's steps (1 of 6)",
        "not run yet (1 of 6)",
    ]
    assert reasons([outcome(2.6, 5.0, 7.4)]) == ["the seeds do not separate them (1 of 1)"]
    assert reasons([outcome(9.0, -9.0, 0.0, limit=2.0)]) == ["the seeds differ by more than the claim allows (1 of 1)"]
    assert reasons([outcome(1.9, 2.3, 1.7, limit=2.0)]) == ["the interval ends beyond what the claim allows (1 of 1)"]
    assert reasons([HELD_ONE, AGAINST_ONE, LESS_ONE]) == []


def test_an_answer_is_yes_no_or_what_is_known() -> None:
    own = Own("own-x", "000-T1", "?", yes="Yes.", no="No.", compare=(ABOVE,))
    assert answer(own, [HELD_ONE, HELD_ONE]) == "Yes."
    assert answer(own, [AGAINST_ONE, OPEN_ONE]) == "No."
    assert answer(own, [HELD_ONE, AGAINST_ONE]) == "Undecided: 1 of 2 comparisons held, 1 contradicted."
    assert answer(own, [OPEN_ONE]) == "Undecided: 0 of 1 comparisons held, 0 contradicted."
    assert answer(own, [NONE]) == "Not run yet."


def test_a_difference_that_is_detectable_is_found_as_often_as_said() -> None:
    """By simulation. Control: half of it is found less often."""
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4000, 10))
    spread = outcome(*np.tile([-1.0, 1.0], 5) * math.sqrt(9 / 10))  # a standard deviation of 1
    assert np.std(spread.differences, ddof=1) == pytest.approx(1)
    found = [float((ttest_1samp(draws + shift, 0, axis=1).pvalue < 0.05).mean()) for shift in (spread.detectable, spread.detectable / 2)]
    assert found[0] == pytest.approx(POWER, abs=0.02)
    assert found[1] < 0.5


@pytest.mark.parametrize(("seeds", "deviations"), [(3, 3.26), (5, 1.68), (8, 1.16)])
def test_what_so_many_seeds_can_see(seeds: int, deviations: float) -> None:
    """In paired standard deviations, as the register's rules say."""
    values = np.linspace(-1, 1, seeds)
    assert outcome(*(values / np.std(values, ddof=1))).detectable == pytest.approx(deviations, abs=0.01)


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


def test_divisions_of_the_same_subjects_find_a_difference_that_is_none_as_rarely_as_said() -> None:
    """By simulation: two nearest-mean classifiers that read different noise of 100 people, ten divisions 4 : 1, 400 draws of people.
    Control: the test that takes divisions for independent draws finds one too often."""
    rng = np.random.default_rng(0)

    def wrongly_found(resampled: float, draws: list[tuple[float, ...]]) -> float:
        return sum(outcome(*d, resampled=resampled).p < LEVEL for d in draws) / len(draws)

    draws = [divisions(rng) for _ in range(400)]
    assert wrongly_found(0.25, draws) <= LEVEL + 0.025
    assert wrongly_found(0.0, draws) > 3 * LEVEL


def divisions(rng: np.random.Generator) -> tuple[float, ...]:
    """Points by which one classifier is ahead of the other, in each of ten divisions of the same people."""
    y = np.repeat([-1, 1], 50)
    views = y[:, None] * 0.3 + rng.standard_normal((2, 100, 5))
    found = []
    for _ in range(10):
        train, test = np.split(rng.permutation(100), [80])
        right = [(np.sign(x[test] @ (y[train] @ x[train])) == y[test]).mean() for x in views]
        found.append(100 * float(right[0] - right[1]))
    return tuple(found)
