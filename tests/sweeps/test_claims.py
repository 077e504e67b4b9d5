"""Claims: what paired seeds say of a comparison, and what comparisons say of a claim."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import stdev

import numpy as np
import pytest
from scipy.stats import t as student  # type: ignore[import-untyped]
from scipy.stats import ttest_1samp, ttest_rel

from fl_bn.run.config import ConfigError
from fl_bn.sweep.claims import (
    AGAINST,
    HELD,
    LEVEL,
    NOT,
    NOT_RUN,
    OPEN,
    PARTLY,
    POWER,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    Claim,
    Comparison,
    Outcome,
    parse_claim,
    undecided_for,
    verdict,
)
from tests.sweeps.evidence_runs import ABOVE

NEAR = Comparison(("A", "x"), ("B", "x"), 2.0)


def test_p_values_and_intervals_are_those_of_scipy() -> None:
    left, right = [61.0, 63.5, 60.2, 64.0], [60.0, 60.5, 61.0, 61.1]
    one = Outcome(ABOVE, tuple(a - b for a, b in zip(left, right, strict=True)))
    expected = ttest_rel(left, right)
    interval = expected.confidence_interval()
    assert one.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert (one.mean - one.half, one.mean + one.half) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert one.p != pytest.approx(ttest_rel(left, right[::-1]).pvalue, rel=1e-3)  # pairs matter


@pytest.mark.parametrize(
    ("comparison", "differences", "state"),
    [
        (ABOVE, (3.0, 3.1, 2.9), HELD),
        (ABOVE, (-3.0, -3.1, -2.9), AGAINST),
        (ABOVE, (3.0, -2.0, 1.0), OPEN),
        (ABOVE, (30.0,), OPEN),
        (ABOVE, (3.0, 3.1), OPEN),
        (ABOVE, (0.0, 0.0, 0.0), OPEN),
        (NEAR, (0.1, -0.1, 0.2), HELD),
        (NEAR, (5.0, 5.1, 4.9), AGAINST),
        (NEAR, (1.9, 2.3, 1.7), OPEN),
        (NEAR, (-1.0, -1.0, -1.0), HELD),
        (NEAR, (-1.0, -1.0), OPEN),
    ],
)
def test_what_seeds_decide(comparison: Comparison, differences: tuple[float, ...], state: str) -> None:
    assert Outcome(comparison, differences).state == state


def test_verdicts() -> None:
    held, against, open_, single, none = (Outcome(ABOVE, d) for d in ((3.0, 3.1, 2.9), (-3.0, -3.1, -2.9), (9.0, -9.0, 0.0), (9.0,), ()))
    claim = Claim("A is ahead", compare=(ABOVE, ABOVE))
    pairs = ((held, held), (held, against), (held, none), (open_, against), (single, none), (none, none))
    assert [verdict(claim, list(pair)) for pair in pairs] == [
        REPRODUCED, PARTLY, PARTLY, NOT, UNDECIDED, NOT_RUN,
    ]  # fmt: skip
    assert verdict(replace(claim, untestable="no data"), [held]) == UNTESTABLE
    assert math.isnan(single.p)


def test_a_claim_is_not_reproduced_only_where_its_effect_would_have_been_seen() -> None:
    """Two seeds, cells that are missing, or a paper's difference that is too small to be found. Control: three seeds that would have."""
    found = Outcome(ABOVE, (1.0, -1.0, 0.5), paper=9.0)
    claim = Claim("A is ahead", compare=(ABOVE,))
    assert 1 < found.detectable < 9
    assert verdict(claim, [found]) == verdict(claim, [replace(found, paper=None)]) == NOT
    assert verdict(claim, [replace(found, differences=(1.0, -1.0))]) == UNDECIDED
    assert verdict(claim, [found], incomplete=True) == UNDECIDED
    assert verdict(claim, [found, replace(found, paper=1.0)]) == UNDECIDED
    assert undecided_for([found, replace(found, paper=1.0)]) == "what is claimed would not have been seen in 1 of 2 comparisons"
    assert undecided_for([found]) == ""


def test_a_distance_that_no_seeds_like_these_could_have_shown_is_undecided() -> None:
    """Control: seeds that differ less, around the bound itself."""
    claim = Claim("A is near B", compare=(NEAR,))
    assert verdict(claim, [Outcome(NEAR, (9.0, -9.0, 0.0))]) == UNDECIDED
    assert verdict(claim, [Outcome(NEAR, (1.9, 2.3, 1.7))]) == NOT


def test_a_contradicted_claim_is_not_reproduced_whatever_else_is_open() -> None:
    claim = Claim("A is ahead", compare=(ABOVE, ABOVE))
    against, coarse = Outcome(ABOVE, (-3.0, -3.1, -2.9)), Outcome(ABOVE, (9.0, -9.0, 0.0), paper=1.0)
    assert verdict(claim, [against, coarse], incomplete=True) == NOT
    assert verdict(claim, [coarse, coarse], incomplete=True) == UNDECIDED


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"claim": "c", "compared": []}, "key 'compared'"),
        ({"claim": ""}, "needs a claim"),
        ({"claim": "c", "resampled": "two"}, "resampled as a number"),
        ({"claim": "c", "resampled": -0.25}, "resampled as a number"),
        ({"claim": "c", "resampled": True}, "resampled as a number"),
        ({"claim": "c", "compare": [{"left": ["A"], "right": ["B", "x"]}]}, "a comparison is"),
        ({"claim": "c", "compare": [{"left": ["A", "x"], "right": ["B", "x"], "within": "2"}]}, "a comparison is"),
        ({"claim": "c", "compare": [{"left": ["A", "x"], "right": ["B", "x"], "metric": 2}]}, "a comparison is"),
        ({"claim": "c", "compare": [{"left": ["A", "x"], "right": ["B", "x"], "than": 2}]}, "a comparison is"),
        ({"claim": "c", "why": [{"asks": "why?"}]}, "needs the first two"),
        ({"claim": "c", "why": [{"variant": "v", "asks": "why?", "perhaps": "who knows"}]}, "needs the first two"),
    ],
)
def test_a_wrong_table_is_named(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_claim(table, "X-1.toml")


def test_a_difference_that_is_detectable_is_found_as_often_as_said() -> None:
    """By simulation. Control: half of it is found less often."""
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4000, 10))
    spread = Outcome(ABOVE, tuple(np.tile([-1.0, 1.0], 5) * math.sqrt(9 / 10)))  # a standard deviation of 1
    assert np.std(spread.differences, ddof=1) == pytest.approx(1)
    found = [float((ttest_1samp(draws + shift, 0, axis=1).pvalue < 0.05).mean()) for shift in (spread.detectable, spread.detectable / 2)]
    assert found[0] == pytest.approx(POWER, abs=0.02)
    assert found[1] < 0.5


def test_seeds_that_divide_the_same_samples_have_the_variance_of_nadeau_and_bengio() -> None:
    """The closed form: stdev * sqrt(1 / n + test / train). Control: 0, which is the test of scipy."""
    values = (1.0, 4.5, 2.5, 3.0, -1.0)
    plain, one = Outcome(ABOVE, values), Outcome(ABOVE, values, resampled=0.25)
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
        return sum(Outcome(ABOVE, d, resampled=resampled).p < LEVEL for d in draws) / len(draws)

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
