"""Laws of every rule: the order of the rows, a common shift of them and options switched off change nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import RULES, bucketing, centered_clipping, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from fl_bn.robust.gram import gram
from fl_bn.robust.table import Table
from tests.listed import listed
from tests.robust.cases import MIXED, NAMES, SIMPLE, Cohort, apart, close, cohorts, few, same_report, some

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
def test_nor_is_it_for_a_report_with_rejected_rows(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, least_f=1, honest=4))
    x, order = cohort.rows(np.inf), np.random.default_rng(cohort.n).permutation(cohort.n)
    want, got = rule_named(name)(x, cohort.f), rule_named(name)(x[order], cohort.f)
    close(got.value, want.value, 1e-6)
    same_report(got.report, want.report, order)
    assert list(want.report.rejected) == cohort.liars


@pytest.mark.parametrize("name", SIMPLE)
@few
@given(data=st.data())
def test_buckets_of_one_row_are_the_rows(name: str, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name, honest=3))
    x, rule = cohort.rows(3.0), rule_named(name)
    one_each = partial(bucketing, then=rule, size=1)
    close(one_each(x, cohort.f).value, rule(x, cohort.f).value, 1e-6)
    same_report(one_each(x, cohort.f).report, rule(x, cohort.f).report)


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


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e6])
@some
@given(cohort=cohorts("krum"))
def test_float32_rows_with_much_in_common_keep_their_distances(offset: float, cohort: Cohort) -> None:
    rows = (cohort.rows(3.0) * 10 + offset).astype(np.float32)
    squares = gram(Table.of(rows)).squared_distances
    np.testing.assert_allclose(squares, apart(rows) ** 2, rtol=1e-4, atol=1e-5 * np.median(squares))


@some
@given(cohort=cohorts("krum"))
def test_float64_rows_with_almost_all_in_common_too(cohort: Cohort) -> None:
    rows = cohort.rows(3.0) + 1e9
    np.testing.assert_allclose(gram(Table.of(rows)).squared_distances, apart(rows) ** 2, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_hardly_differ_have_no_negative_distances(dtype: str, rng: np.random.Generator) -> None:
    for scale in (1e-5, 1e-8, 1e-12):
        rows = (rng.normal(size=40) + scale * rng.normal(size=(12, 40))).astype(dtype)
        rows[8:] = rng.normal(size=(4, 40))
        assert (gram(Table.of(rows)).squared_distances >= 0).all()
        for name in SIMPLE:
            np.testing.assert_allclose(rule_named(name)(rows[:8], 2).value, rows[0], rtol=0, atol=10 * scale + 1e-6)
            assert np.isfinite(rule_named(name)(rows, 4).value).all()


def test_nor_do_a_few_that_hardly_differ(rng: np.random.Generator) -> None:
    negative = 0
    for _ in range(10):
        rows = rng.normal(size=(20, 40))
        rows[12:] = rows[12] + 1e-9 * rng.normal(size=(8, 40))
        products = rows @ rows.T
        negative += int((np.diag(products)[:, None] + np.diag(products)[None] - 2 * products < 0).sum())
        assert (gram(Table.of(rows)).squared_distances >= 0).all()
    assert negative > 0  # negative control


@pytest.mark.parametrize("n", [4, 5, 7, 9])
def test_which_row_clipping_starts_at_does_not_depend_on_their_order(n: int, rng: np.random.Generator) -> None:
    """Two rows may be each other's median neighbour: of such a pair, too, one is in the midst."""
    for _ in range(30):
        x, order = rng.normal(size=(n, 3)), rng.permutation(n)
        close(centered_clipping(x, 1).value, centered_clipping(x[order], 1).value, 1e-6)


def test_copies_of_a_row_ask_for_no_second_pass(rng: np.random.Generator) -> None:
    rows = rng.normal(size=(9, 40))
    rows[3] = rows[7]
    assert gram(Table.of(rows)).centre is None
    assert gram(Table.of(rows + 1e7)).centre is not None


def test_plain_float32_products_do_not(rng: np.random.Generator) -> None:
    """Negative control: what the fallbacks are for."""
    rows = (rng.normal(size=(7, 20)) + 1e4).astype(np.float32)
    products = rows @ rows.T
    norms = np.diag(products)
    assert np.abs(norms[:, None] + norms[None] - 2 * products - apart(rows) ** 2).max() > 1.0


@pytest.mark.parametrize("name", ["krum", "multi-krum", "nnm+mean"])
@pytest.mark.parametrize("offset", [1e4, 1e5])
@few
@given(data=st.data())
def test_float32_rows_with_much_in_common_choose_the_same_rows(name: str, offset: float, data: st.DataObject) -> None:
    cohort = data.draw(cohorts(name))
    rows = (cohort.rows(3.0) * 10 + offset).astype(np.float32)
    exact = rows.astype(np.float64) - offset
    close(rule_named(name)(rows, cohort.f).report.weights, rule_named(name)(exact, cohort.f).report.weights)


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
def test_the_mean_is_numpys_average_in_float64(cohort: Cohort, dtype: str) -> None:
    x = cohort.honest.astype(dtype)
    weights = np.random.default_rng(cohort.n).uniform(0, 3, cohort.n)
    exact = np.average(x.astype(np.float64), axis=0, weights=weights)
    got = mean(x, weights=weights).value
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, exact.astype(dtype), rtol=1e-6 if dtype == "float32" else 0, atol=1e-14)
    np.testing.assert_allclose(mean(x).value, x.mean(0, dtype=np.float64), rtol=0, atol=1e-6 if dtype == "float32" else 1e-14)


def test_a_float32_mean_is_not_summed_in_float32() -> None:
    x = np.array([[1e8], [1.0], [-1e8]], dtype=np.float32)
    assert mean(x).value == np.float32(1 / 3)
    assert x.mean(0) != np.float32(1 / 3)


@pytest.mark.parametrize("name", [name for name in RULES if "krum" not in name])
def test_one_row_is_its_own_aggregate(name: str) -> None:
    x = np.array([[1.5, -2.0, 0.0]])
    for rule in (RULES[name], rule_named(f"nnm+{name}"), rule_named(f"bucketing+{name}")):
        np.testing.assert_array_equal(rule(x, 0).value, x[0])


@listed("name", [*SIMPLE, *MIXED])
@listed("dtype", ["float32", "float64"])
def test_equal_rows_give_that_row(name: str, dtype: str) -> None:
    x = np.tile(np.array([0.1, -3e3, 0.0], dtype), (5, 1))
    np.testing.assert_allclose(rule_named(name)(x, 1).value, x[0], rtol=1e-6 if dtype == "float32" else 1e-14)
