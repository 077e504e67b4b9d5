"""What f Byzantine rows can do does not grow with their numbers, and rows that are no numbers leave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import mean, rule_named
from tests.listed import listed
from tests.robust.cases import MIXED, SIMPLE, SIZES, TOLERANCE, Cohort, close, cohorts, few, narrow_blocks, some

SELECTING = [name for name in MIXED if name != "nnm+mean"]
UNMOVED = ["median", "trimmed-mean", "krum", "multi-krum", *SELECTING]
ROBUST = [name for name in [*SIMPLE, *SELECTING] if name != "mean"]
POISON = (np.nan, np.inf, -np.inf)


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
    """Minsker, Geometric median and robust estimation, Lemma 2.1; a step of clipping is at most the radius."""
    cohort = data.draw(cohorts(name, least_f=1, dims=1))
    honest = 2 * (cohort.n - cohort.f) / (cohort.n - 2 * cohort.f)
    bound = cohort.diameter * (honest if name == "geometric-median" else 25)
    for size in SIZES[dtype]:
        value = rule_named(name)(cohort.rows(size, dtype), cohort.f).value
        assert np.linalg.norm(value - cohort.honest.mean(0)) <= bound + TOLERANCE[dtype]


@some
@given(cohort=cohorts(least_f=1, most_f=1))
def test_one_row_moves_the_mean_anywhere(cohort: Cohort) -> None:
    """Negative control."""
    assert (np.abs(mean(cohort.rows(1e10), cohort.f).value) > 1e8).any()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["krum", "multi-krum", "nnm+median"])
@pytest.mark.parametrize(("dtype", "offset"), [("float32", 1e4), ("float64", 1e9)])
@pytest.mark.parametrize("ratio", [1e1, 1e2, 1e4])
@given(data=st.data())
@few
def test_an_attack_does_not_hide_what_rows_have_in_common(name: str, dtype: str, offset: float, ratio: float, data: st.DataObject) -> None:
    """Far rows must not make distances among the others look well resolved."""
    cohort = data.draw(cohorts(name, least_f=1, most_f=5))
    rows = cohort.rows(offset * ratio) + offset
    rows = rows.astype(dtype).astype(np.float64)
    want, got = rule_named(name)(rows - offset, cohort.f), rule_named(name)(rows.astype(dtype), cohort.f)
    close(got.value - offset, want.value, 10 * offset * np.finfo(dtype).eps)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", ROBUST)
@few
@given(data=st.data())
def test_rows_with_one_number_that_is_none_leave(name: str, dtype: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, least_f=1))
    rows, alone = cohort.rows(3.0, dtype), cohort.spread(np.r_[np.ones(cohort.n - cohort.f), np.zeros(cohort.f)]) == 1
    for k, i in enumerate(cohort.liars):
        rows[i, data.draw(st.integers(0, rows.shape[1] - 1))] = POISON[k % 3]
    got, want = rule_named(name)(rows, cohort.f), rule_named(name)(rows[alone], 0)
    np.testing.assert_array_equal(got.value, want.value)
    assert list(got.report.rejected) == cohort.liars
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
