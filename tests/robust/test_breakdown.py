"""Where the honest majority holds the value, and that it does not past the bound."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import centered_clipping, geometric_median, krum, mean, median, multi_krum, nnm, trimmed_mean
from tests.listed import listed
from tests.robust.cases import Cohort, close, cohorts, some

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
def test_coordinate_rules_stay_among_the_honest(rule: type, case: tuple[Cohort, np.ndarray, np.ndarray]) -> None:
    cohort, rows, _ = case
    assert outside(cohort, rule(rows, cohort.f).value) <= 1e-14
    assert outside(cohort, nnm(rows, cohort.f, then=rule).value) <= 4 if cohort.f else 1e-14


@pytest.mark.parametrize("rule", COORDINATE)
@some
@given(case=lies())
def test_whatever_weights_are_claimed(rule: type, case: tuple[Cohort, np.ndarray, np.ndarray]) -> None:
    cohort, rows, weights = case
    assert outside(cohort, rule(rows, cohort.f, weights=weights).value) <= 1e-14


@pytest.mark.parametrize("rule", [*COORDINATE, mean])
def test_an_undeclared_heavy_row_decides_alone(rule: type) -> None:
    """Negative control: the cap on weights is what f is for."""
    rows, weights = np.array([[0.0], [1.0], [2.0], [3.0], [1e9]]), [1.0, 1, 1, 1, 10]
    assert rule(rows, 0, weights=weights).value[0] > 1e8
    if rule is not mean:
        assert rule(rows, 1, weights=weights).value[0] <= 3


@pytest.mark.parametrize("f", [1, 2, 5])
def test_one_row_too_many_drives_the_median_out(f: int, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(2 * f + 1, 3))
    rows[: f + 1] = 1e6
    assert (median(rows, f).value == 1e6).all()
    rows[f] = 0.0
    assert (np.abs(median(rows, f).value) < 5).all()


@listed("f", [1, 2, 5])
@listed("n", [11, 12, 20])
def test_one_row_too_many_drives_the_trimmed_mean_out(f: int, n: int, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(n, 3))
    rows[: f + 1] = 1e6
    assert (trimmed_mean(rows, f).value > 1e6 / n - 10).all()
    assert (trimmed_mean(rows, f, weights=np.ones(n)).value > 1e6 / n - 10).all()
    rows[f] = 0.0
    assert (np.abs(trimmed_mean(rows, f).value) < 5).all()
    assert (np.abs(trimmed_mean(rows, f, weights=np.ones(n)).value) < 5).all()


@pytest.mark.parametrize("rule", [krum, multi_krum])
@pytest.mark.parametrize("f", [1, 2, 3])
def test_too_many_equal_rows_drive_krum_out(rule: type, f: int, rng: np.random.Generator) -> None:
    n = 2 * f + 3
    rows = rng.normal(size=(n, 3))
    rows[: n - f - 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f : n - f - 1] = 0.0
    assert (np.abs(rule(rows, f).value) < 5).all()


@listed("rule", [geometric_median, centered_clipping, partial(nnm, then=median)])
@listed("f", [1, 2, 4])
def test_one_row_too_many_drives_the_others_out(rule: type, f: int, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(2 * f + 1, 3))
    rows[: f + 1] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f] = 0.0
    assert (np.abs(rule(rows, f).value) < 30).all()


@pytest.mark.parametrize("rule", [geometric_median, centered_clipping])
def test_weights_are_capped_there_too(rule: type, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(7, 3))
    rows[0] = 1e6
    claimed = [1e9, 1, 1, 1, 1, 1, 1]
    assert (np.abs(rule(rows, 1, weights=claimed).value) < 30).all()
    honest = np.where(np.arange(7) == 0, 6 * 3 / 4, 1.0)  # the share (n - 1) / 2n of the total
    close(rule(rows, 1, weights=claimed).value, rule(rows, 1, weights=honest).value)


def test_a_claim_is_worth_nothing_once_its_row_has_left(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(7, 3))
    rows[2, 1] = np.nan
    weights = np.array([1.0, 2, 1e9, 1, 3, 1, 1])
    kept = np.delete(np.arange(7), 2)
    for rule in (mean, median, trimmed_mean, geometric_median, centered_clipping):
        got = rule(rows, 1, weights=weights)
        np.testing.assert_array_equal(got.value, rule(rows[kept], 0, weights=weights[kept]).value)


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
