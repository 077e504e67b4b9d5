"""Laws of every rule: the order of the rows and a common shift change nothing else, and f rows do no more than a bounded harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import (
    centered_clipping,
    geometric_median,
    krum,
    mean,
    median,
    multi_krum,
    nnm,
    rule_named,
    trimmed_mean,
)
from tests.listed import listed
from tests.robust.cases import MIXED, NAMES, SIMPLE, SIZES, TOLERANCE, Cohort, close, cohorts, few, narrow_blocks, same_report, some

TIED = ("nnm+krum", "nnm+centered-clipping", "bucketing+nnm+krum")  # equal mixes, and pairs of them equally good: any may be chosen
SELECTING = [name for name in MIXED if name != "nnm+mean"]
UNMOVED = ["median", "trimmed-mean", "krum", "multi-krum", *SELECTING]
ROBUST = [name for name in [*SIMPLE, *SELECTING] if name != "mean"]
LARGE = [0.0, 1.0, -3.0, 1e10, -1e100]

# what changes nothing


@pytest.mark.parametrize("name", [*SIMPLE, *(name for name in MIXED if name not in TIED), "nnm+nnm+median"])
@few
@given(data=st.data())
def test_the_order_of_the_rows_is_nothing(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, honest=4))  # of three rows, two are the nearest to each other: which of them is in the midst?
    x, order = cohort.rows(3.0), np.random.default_rng(cohort.n).permutation(cohort.n)
    want, got = rule_named(name)(x, cohort.f), rule_named(name)(x[order], cohort.f)
    close(got.value, want.value, 1e-6)
    if name != "nnm+geometric-median":  # its weights could be shared out among equal mixes otherwise
        same_report(got.report, want.report, order)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in TIED])
@pytest.mark.parametrize("offset", [-7.0, 1e6])
@few
@given(data=st.data())
def test_a_common_shift_moves_the_value_by_itself(name: str, offset: float, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, honest=3))
    x, rule = cohort.rows(3.0), rule_named(name)
    shift = offset * np.linspace(0.5, 1, x.shape[1])
    np.testing.assert_allclose(rule(x + shift, cohort.f).value - shift, rule(x, cohort.f).value, rtol=0, atol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
@few
@given(data=st.data())
def test_distances_are_those_to_the_value(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name))
    x = cohort.rows(50.0)
    value, report = rule_named(name)(x, cohort.f)
    close(report.distances, np.sqrt(((x - value) ** 2).sum(1)))
    assert report.rejected == ()


@some
@given(cohort=cohorts(least_f=1))
def test_far_rows_are_far_from_the_value(cohort: Cohort) -> None:
    report = median(cohort.rows(1e3), cohort.f).report
    assert report.far == tuple(np.flatnonzero(report.distances > 3 * np.median(report.distances)))
    assert set(cohort.liars) <= set(report.far) or cohort.n < 2 * cohort.f + 2  # there the median is of lies, too


# what f rows can do


@st.composite
def lies(draw: st.DrawFn) -> tuple[Cohort, np.ndarray]:
    """A cohort, and its rows: f of them with any numbers in any coordinate."""
    cohort = draw(cohorts(most_f=6, extra=12, dims=1))
    rng, rows = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), cohort.rows(1.0)
    rows[cohort.liars] = rng.choice(LARGE, (cohort.f, rows.shape[1])) * rng.uniform(0, 1, (cohort.f, 1))
    return cohort, rows


@pytest.mark.parametrize("rule", [median, trimmed_mean])
@some
@given(case=lies())
def test_coordinate_rules_stay_among_the_honest(rule: Callable[..., object], case: tuple[Cohort, np.ndarray]) -> None:
    cohort, rows = case

    def outside(value: np.ndarray) -> float:
        """How far the value is from the honest box, in units of the largest honest number."""
        low, high = cohort.honest.min(0), cohort.honest.max(0)
        return float(np.maximum(low - value, value - high).max() / np.abs(cohort.honest).max())

    assert outside(rule(rows, cohort.f).value) <= 1e-14
    assert outside(nnm(rows, cohort.f, then=rule).value) <= (4 if cohort.f else 1e-14)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", UNMOVED)
@few
@given(data=st.data())
def test_the_size_of_an_attack_is_nothing(name: str, dtype: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, least_f=1))
    first, *rest = [rule_named(name)(cohort.rows(size, dtype), cohort.f) for size in SIZES[dtype]]
    for other in rest:
        close(other.value, first.value, TOLERANCE[dtype])
        assert other.report.rejected == first.report.rejected == ()
    if name in SELECTING or name == "multi-krum":
        close(first.value, cohort.honest.mean(0), TOLERANCE[dtype])
    if name == "krum":
        assert (cohort.honest.astype(dtype) == first.value).all(1).any()


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", ["geometric-median", "centered-clipping"])
@few
@given(data=st.data())
def test_rules_that_pull_stay_within_a_bound_of_the_honest_spread(name: str, dtype: str, data: st.DataObject) -> None:
    """Minsker, Geometric median and robust estimation, Lemma 2.1; a step of clipping is at most the radius. The mean has no bound."""
    cohort = data.draw(cohorts(name, least_f=1, dims=1))
    honest = 2 * (cohort.n - cohort.f) / (cohort.n - 2 * cohort.f)
    bound = cohort.diameter * (honest if name == "geometric-median" else 25) + TOLERANCE[dtype]
    for size in SIZES[dtype]:
        rows = cohort.rows(size, dtype)
        assert np.linalg.norm(rule_named(name)(rows, cohort.f).value - cohort.honest.mean(0)) <= bound
        assert np.abs(mean(rows, cohort.f).value).max() > size / cohort.n / 4  # control


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["krum", "multi-krum", "nnm+median"])
@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1e4), ("float64", 1e9)])
@pytest.mark.parametrize("ratio", [1e1, 1e2, 1e4])
@given(data=st.data())
@few
def test_an_attack_does_not_hide_what_rows_have_in_common(name: str, dtype: str, offset: float, ratio: float, data: st.DataObject) -> None:
    """Far rows must not make distances among the others look well resolved."""
    cohort = data.draw(cohorts(name, least_f=1, most_f=5))
    rows = (cohort.rows(offset * ratio) + offset).astype(dtype)
    want, got = rule_named(name)(rows.astype(np.float64) - offset, cohort.f), rule_named(name)(rows, cohort.f)
    close(got.value - offset, want.value, 10 * offset * np.finfo(dtype).eps)


@listed("rule", [median, trimmed_mean, geometric_median, centered_clipping, partial(nnm, then=median), krum, multi_krum])
@listed("f", [1, 2, 5])
def test_one_row_too_many_drives_a_rule_out(rule: Callable[..., object], f: int, rng: np.random.Generator) -> None:
    krums = rule in (krum, multi_krum)
    n, enough = (2 * f + 3, f + 2) if krums else (2 * f + 1, f + 1)  # equal rows are each other's neighbours
    rows = rng.normal(size=(n, 3))
    rows[:enough] = 1e6
    assert (rule(rows, f).value > 1e5).all()
    rows[f:enough] = 0.0
    assert (np.abs(rule(rows, f).value) < 30).all()


# rows that are no numbers, or hardly


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", ROBUST)
@few
@given(data=st.data())
def test_rows_with_one_number_that_is_none_leave(name: str, dtype: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, least_f=1))
    rows, alone = cohort.rows(3.0, dtype), cohort.spread(np.r_[np.ones(cohort.n - cohort.f), np.zeros(cohort.f)]) == 1
    for k, i in enumerate(cohort.liars):
        rows[i, data.draw(st.integers(0, rows.shape[1] - 1))] = (np.nan, np.inf, -np.inf)[k % 3]
    got, want = rule_named(name)(rows, cohort.f), rule_named(name)(rows[alone], 0)
    np.testing.assert_array_equal(got.value, want.value)
    assert list(got.report.rejected) == np.flatnonzero(np.isinf(got.report.distances)).tolist() == cohort.liars
    assert set(cohort.liars) <= set(got.report.far)
    if name in (*SELECTING, "krum", "multi-krum"):
        close(got.value, rule_named(name)(cohort.rows(SIZES[dtype][-1], dtype), cohort.f).value, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["krum", "multi-krum", "median", "trimmed-mean", "nnm+trimmed-mean"])
@few
@given(data=st.data())
def test_f_goes_down_by_the_rows_that_left(name: str, data: st.DataObject) -> None:
    """Some lies are huge, the others are no numbers."""
    cohort = data.draw(cohorts(name, least_f=2, most_f=4))
    rows, gone = cohort.rows(1e10), cohort.liars[:: data.draw(st.integers(2, 3))]
    rows[gone, 0] = np.nan
    got, want = rule_named(name)(rows, cohort.f), rule_named(name)(np.delete(rows, gone, 0), cohort.f - len(gone))
    np.testing.assert_array_equal(got.value, want.value)
    assert list(got.report.rejected) == gone
    if "krum" in name:
        close(got.value, rule_named(name)(cohort.rows(1e10), cohort.f).value)


def test_infinities_of_both_signs_do_not_cancel(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(6, 200))
    rows[2, 3], rows[2, 150] = np.inf, -np.inf
    with narrow_blocks():
        assert rule_named("median")(rows, 1).report.rejected == (2,)


@listed("name", ROBUST)
def test_float32_rows_whose_sum_overflows_are_rows(name: str, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(9, 40)).astype(np.float32)
    rows[4] = 3e38
    got = rule_named(name)(rows, 1)
    assert got.report.rejected == ()
    assert np.abs(got.value).max() < 10


@listed("dtype", ["float32", "float64"])
@listed("name", SIMPLE)
def test_rows_that_hardly_differ_are_no_trouble(name: str, dtype: str, rng: np.random.Generator) -> None:
    for scale in (1e-5, 1e-8, 1e-12):
        rows = (rng.normal(size=40) + scale * rng.normal(size=(12, 40))).astype(dtype)
        rows[8:] = rng.normal(size=(4, 40))
        np.testing.assert_allclose(rule_named(name)(rows[:8], 2).value, rows[0], rtol=0, atol=10 * scale + 1e-6)
        assert np.isfinite(rule_named(name)(rows, 4).value).all()
