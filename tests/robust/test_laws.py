"""Laws of every rule: what its report says, and that f rows do no more than a bounded harm, whatever their size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import mean, median, rule_named
from tests.listed import listed
from tests.robust.cases import MIXED, NAMES, SIMPLE, SIZES, TOLERANCE, Cohort, apart, close, cohorts, few, some

SELECTING = [name for name in MIXED if name != "nnm+mean"]
UNMOVED = ["median", "trimmed-mean", "krum", "multi-krum", *SELECTING]
ROBUST = [name for name in [*SIMPLE, *SELECTING] if name != "mean"]


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
    bound = apart(cohort.honest).max() * (honest if name == "geometric-median" else 25) + TOLERANCE[dtype]
    for size in SIZES[dtype]:
        rows = cohort.rows(size, dtype)
        assert np.linalg.norm(rule_named(name)(rows, cohort.f).value - cohort.honest.mean(0)) <= bound
        assert np.abs(mean(rows, cohort.f).value).max() > bound  # control


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


@listed("name", ROBUST)
def test_float32_rows_whose_sum_overflows_are_rows(name: str, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(9, 40)).astype(np.float32)
    rows[4] = 3e38
    got = rule_named(name)(rows, 1)
    assert got.report.rejected == ()
    assert np.abs(got.value).max() < 10
