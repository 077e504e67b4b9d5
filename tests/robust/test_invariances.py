"""Laws of every rule: the order of the rows, a common shift of them and options switched off change nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import bucketing, centered_clipping, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from tests.robust.cases import MIXED, NAMES, SIMPLE, Cohort, close, cohorts, few, same_report, some

TIED = ("nnm+krum", "nnm+centered-clipping", "bucketing+nnm+krum")  # equal mixes, and pairs of them equally good: any may be chosen
SELECTED = [name for name in NAMES if name not in TIED]


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


@pytest.mark.parametrize("name", SIMPLE)
@few
@given(data=st.data())
def test_buckets_of_one_row_are_the_rows(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, honest=3))
    x, rule = cohort.rows(3.0), rule_named(name)
    one_each = partial(bucketing, then=rule, size=1)
    close(one_each(x, cohort.f).value, rule(x, cohort.f).value, 1e-6)
    same_report(one_each(x, cohort.f).report, rule(x, cohort.f).report)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("offset", [-7.0, 1e6])
@few
@given(data=st.data())
def test_a_common_shift_moves_the_value_by_itself(name: str, offset: float, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, honest=3))
    x, rule = cohort.rows(3.0), rule_named(name)
    shift = offset * np.linspace(0.5, 1, x.shape[1])
    got = rule(x + shift, cohort.f).value - shift
    np.testing.assert_allclose(got, rule(x, cohort.f).value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_hardly_differ_are_no_trouble(dtype: str, rng: np.random.Generator) -> None:
    for scale in (1e-5, 1e-8, 1e-12):
        rows = (rng.normal(size=40) + scale * rng.normal(size=(12, 40))).astype(dtype)
        rows[8:] = rng.normal(size=(4, 40))
        for name in SIMPLE:
            np.testing.assert_allclose(rule_named(name)(rows[:8], 2).value, rows[0], rtol=0, atol=10 * scale + 1e-6)
            assert np.isfinite(rule_named(name)(rows, 4).value).all()


@some
@given(cohort=cohorts(most_f=0, extra=17, honest=3))
def test_without_byzantine_rows_mixing_is_the_mean(cohort: Cohort) -> None:
    x = cohort.honest
    scale = np.abs(x).max(0)
    for then in (median, trimmed_mean, mean):
        np.testing.assert_array_less(np.abs(nnm(x, 0, then=then).value - x.mean(0)), 1e-15 * scale)
    np.testing.assert_array_less(np.abs(trimmed_mean(x, 0).value - x.mean(0)), 1e-15 * scale)
    np.testing.assert_array_less(np.abs(multi_krum(x, 0).value - x.mean(0)), 1e-15 * scale)
    np.testing.assert_array_less(np.abs(centered_clipping(x, 0, radius=1e9).value - x.mean(0)), 1e-13 * scale)


@some
@given(cohort=cohorts(most_f=0, extra=17), dtype=st.sampled_from(["float32", "float64"]))
def test_the_mean_is_numpys_in_float64(cohort: Cohort, dtype: str) -> None:
    x = cohort.honest.astype(dtype)
    got = mean(x).value
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, x.mean(0, dtype=np.float64), rtol=0, atol=1e-6 if dtype == "float32" else 1e-14)
