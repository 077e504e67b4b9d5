"""Where the honest majority holds the value, that it does not past the bound, and that no f weights hold half."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import capped, centered_clipping, geometric_median, krum, mean, median, multi_krum, nnm, trimmed_mean
from tests.listed import listed
from tests.robust.cases import Cohort, cohorts, some

COORDINATE = [median, trimmed_mean]
LARGE = [0.0, 1.0, -3.0, 1e10, -1e100]


@st.composite
def lies(draw: st.DrawFn) -> tuple[Cohort, np.ndarray, np.ndarray]:
    """A cohort, its rows (f of them with any numbers in any coordinate), and weights that anybody may claim."""
    cohort = draw(cohorts(most_f=6, extra=12, dims=1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, weights = cohort.rows(1.0), rng.uniform(0, 1, cohort.n) ** 3
    rows[cohort.liars] = rng.choice(LARGE, (cohort.f, rows.shape[1])) * rng.uniform(0, 1, (cohort.f, 1))
    weights[cohort.liars] *= draw(st.sampled_from([0.0, 1.0, 10.0, 1e300]))
    return cohort, rows, weights


def outside(cohort: Cohort, value: np.ndarray) -> float:
    """How far the value is from the honest box, in units of the largest honest number."""
    low, high = cohort.honest.min(0), cohort.honest.max(0)
    return float(np.maximum(low - value, value - high).max() / np.abs(cohort.honest).max())


@pytest.mark.parametrize("rule", COORDINATE)
@some
@given(case=lies())
def test_coordinate_rules_stay_among_the_honest_whatever_they_claim(rule: type, case: tuple[Cohort, np.ndarray, np.ndarray]) -> None:
    cohort, rows, weights = case
    assert outside(cohort, rule(rows, cohort.f).value) <= 1e-14
    assert outside(cohort, nnm(rows, cohort.f, then=rule).value) <= (4 if cohort.f else 1e-14)
    assert outside(cohort, rule(rows, cohort.f, weights=weights).value) <= 1e-14


@pytest.mark.parametrize("rule", [*COORDINATE, mean])
def test_an_undeclared_heavy_row_decides_alone(rule: type) -> None:
    """Negative control: the cap on weights is what f is for."""
    rows, weights = np.array([[0.0], [1.0], [2.0], [3.0], [1e9]]), [1.0, 1, 1, 1, 10]
    assert rule(rows, 0, weights=weights).value[0] > 1e8
    if rule is not mean:
        assert rule(rows, 1, weights=weights).value[0] <= 3


@pytest.mark.parametrize("rule", [krum, multi_krum])
@pytest.mark.parametrize("f", [1, 2, 3])
def test_too_many_equal_rows_drive_krum_out(rule: type, f: int, rng: np.random.Generator) -> None:
    n = 2 * f + 3
    rows = rng.normal(size=(n, 3))
    rows[: n - f - 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f : n - f - 1] = 0.0
    assert (np.abs(rule(rows, f).value) < 5).all()


@listed("rule", [*COORDINATE, geometric_median, centered_clipping, partial(nnm, then=median)])
@listed("f", [1, 2, 5])
def test_one_row_too_many_drives_a_rule_out(rule: type, f: int, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(2 * f + 1, 3))
    rows[: f + 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f] = 0.0
    assert (np.abs(rule(rows, f).value) < 30).all()


@pytest.mark.parametrize("rule", [mean, median, trimmed_mean, geometric_median, centered_clipping])
def test_those_that_stay_are_capped_by_the_f_that_is_left(rule: type, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(8, 3))
    rows[2, 1], rows[5] = np.nan, 1e6
    weights = np.array([1.0, 2, 5, 1, 3, 1e9, 1, 1])
    kept = np.delete(np.arange(8), 2)
    np.testing.assert_array_equal(rule(rows, 2, weights=weights).value, rule(rows[kept], 1, weights=weights[kept]).value)
    np.testing.assert_array_equal(rule(rows, 1, weights=weights).value, rule(rows[kept], 0, weights=weights[kept]).value)
    if rule is not mean:
        assert (np.abs(rule(rows, 2, weights=weights).value) < 30).all()
    if rule is not centered_clipping:  # ten steps take it nowhere
        assert (np.abs(rule(rows, 1, weights=weights).value) > 1e5).all()


claims = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 5e-324, 1e-300, 1e300, 1.7e308]), st.floats(0, 1e6))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int]:
    weights = draw(st.lists(claims, min_size=1, max_size=20).filter(any))
    return weights, draw(st.integers(0, (len(weights) - 1) // 2))


def heaviest(weights: np.ndarray, f: int) -> float:
    return float(np.sort(weights)[::-1][:f].sum())


@some
@given(case=cases())
def test_the_f_heaviest_hold_less_than_half(case: tuple[list[float], int]) -> None:
    weights, f = case
    n, got = len(weights), capped(*case)
    assert got.shape == (n,)
    assert (got >= 0).all()
    assert got.sum() == pytest.approx(1, abs=1e-14)
    assert heaviest(got, f) <= (n - 1) / (2 * n) + 1e-14


@some
@given(case=cases())
def test_harmless_weights_remain_and_no_more_than_needed_is_cut(case: tuple[list[float], int]) -> None:
    weights, f = case
    n, got = len(weights), capped(*case)
    share = np.array(weights) / max(weights)
    share /= share.sum()
    allowed = (n - 1) / (2 * n)
    if heaviest(share, f) <= allowed:
        np.testing.assert_allclose(got, share, rtol=1e-14)
    elif heaviest(np.sign(share) / np.sign(share).sum(), f) < allowed:  # a common cap that does can be found
        assert heaviest(got, f) == pytest.approx(allowed, rel=1e-9)
        below = got < got.max() * (1 - 1e-12)
        cut = share[~below].min() if below.any() else 0.0
        clear = below & (share > 1e-290)  # the shares of others have lost their digits
        ratios = got[clear] / share[clear]
        np.testing.assert_allclose(ratios, ratios[:1].repeat(len(ratios)), rtol=1e-9)
        assert (share[below] <= cut).all()


@listed(
    ("weights", "f", "want"),
    [
        ([1, 1, 1, 1], 1, [1, 1, 1, 1]),
        ([3, 2, 1], 0, [3, 2, 1]),
        ([1e300, 1, 1, 1, 1], 1, [8 / 3, 1, 1, 1, 1]),  # 2/5 of the total
        ([0, 0, 5, 0, 0], 1, [1, 1, 1, 1, 1]),  # no cap would do: all alike
        ([7, 0, 7, 0, 0], 2, [1, 1, 1, 1, 1]),
        ([7, 7, 7, 7, 0], 2, [1, 1, 1, 1, 1]),
        ([100, 100, 1, 1, 1], 2, [1, 1, 1, 1, 1]),
        ([9, 9, 3, 1, 1, 1, 1], 2, [2.4, 2.4, 2.4, 1, 1, 1, 1]),  # the third is cut, too
        ([100, 1.2, 1, 1, 1, 0.5, 0.5], 2, [1.8, 1.2, 1, 1, 1, 0.5, 0.5]),  # one of the two is cut
        ([100, 4, 1, 1, 1, 1], 1, [5 * 8 / 7, 4, 1, 1, 1, 1]),
    ],
)
def test_by_hand(weights: list[float], f: int, want: list[float]) -> None:
    np.testing.assert_allclose(capped(weights, f), np.array(want) / sum(want), rtol=1e-12)
