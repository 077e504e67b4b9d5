"""Laws of every rule: its report, that f rows do no more than a bounded harm, kinds of rows, what is refused, and how names are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import RULES, Rule, mean, median, nnm, rule_named, trimmed_mean
from tests.listed import listed
from tests.refusals import naming
from tests.robust.cases import MIXED, NAMES, SIMPLE, SIZES, TOLERANCE, apart, close, cohorts, few, mixed_rows

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
    if name in (*SELECTING, "krum", "multi-krum"):
        close(got.value, rule_named(name)(cohort.rows(SIZES[dtype][-1], dtype), cohort.f).value, TOLERANCE[dtype])


@listed("name", ROBUST)
def test_float32_rows_whose_sum_overflows_are_rows(name: str, rng: np.random.Generator) -> None:
    rows = rng.normal(size=(9, 40)).astype(np.float32)
    rows[4] = 3e38
    got = rule_named(name)(rows, 1)
    assert got.report.rejected == ()
    assert np.abs(got.value).max() < 10


# Rows of any kind, what no rule takes, and names


F = 1
KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "vectors": list,
    "torch matrix": torch.from_numpy,
    "torch vectors": lambda x: list(torch.from_numpy(x)),
    "strided": lambda x: list(np.repeat(x, 3, axis=1)[:, ::3]),
}


def numbers(rng: np.random.Generator, dtype: str = "float64") -> np.ndarray:
    x: np.ndarray = rng.normal(size=(9, 234)).astype(dtype)
    x[4] *= 100
    return x


@listed("name", NAMES)
@listed(("dtype", "poison"), [("float32", 1.0), ("float64", 0.0), ("float32", np.nan)])
def test_all_kinds_agree_and_are_only_read(name: str, dtype: str, poison: float, rng: np.random.Generator) -> None:
    x, rule = numbers(rng, dtype), rule_named(name)
    x[2, 5] = poison
    want = rule(x.copy(), F)
    for of_kind in KINDS.values():
        rows = of_kind(x.copy())
        before = copy.deepcopy(rows)
        got = rule(rows, F)
        np.testing.assert_array_equal(got.value, want.value)
        assert (type(got.value), got.value.dtype, got.value.shape) == (type(rows[0]), rows[0].dtype, rows[0].shape)
        assert got.report.rejected == want.report.rejected
        for row, was in zip(rows, before, strict=True):
            np.testing.assert_array_equal(row, was)


def test_the_value_is_nobodys_memory(rng: np.random.Generator) -> None:
    x = numbers(rng)
    assert not np.shares_memory(rule_named("krum")(x, F).value, x)
    assert not median([torch.ones(3, requires_grad=True) for _ in range(5)], 1).value.requires_grad


HALF = ["median", "trimmed-mean", "geometric-median", "centered-clipping"]
FEWEST: list[tuple[Rule, int, int]] = [  # a rule, f, and the fewest rows that it takes
    *((rule_named(name), f, 2 * f + 1) for name in (*HALF, "nnm+mean", "nnm+median") for f in (1, 4)),
    *((rule_named(name), f, 2 * f + 3) for name in ("krum", "multi-krum", "nnm+krum", "nnm+multi-krum") for f in (0, 1, 3)),
]


@listed(("rule", "f", "fewest"), FEWEST)
def test_f_must_be_below_the_rule_s_bound(rule: Rule, f: int, fewest: int) -> None:
    with naming(f"f={f}"):
        rule(np.zeros((fewest - 1, 3)), f)
    rule(np.zeros((fewest, 3)), f)
    mean(np.zeros((1, 3)), 5)  # no bound: no defence


NO_ROWS: dict[str, tuple[Any, str]] = {
    "none finite": (np.full((5, 2), np.nan), "at least 1"),
    "of other lengths": ([np.zeros(3), np.zeros(4)], "same shape"),
    "whole numbers": (np.zeros((2, 3), dtype=int), "rows must be vectors"),
}


@listed("case", NO_ROWS)
@listed("name", ["mean", "median", "nnm+median"])
def test_rows_are_finite_vectors_of_one_length(name: str, case: str) -> None:
    rows, word = NO_ROWS[case]
    with naming(word):
        rule_named(name)(rows, 0)


@listed("name", ["", "medain", "nnm", "nnm+", "median+nnm", "krum+median", "nnm+nnm+median"])
def test_unknown_names(name: str) -> None:
    with naming(repr(name)) as caught:
        rule_named(name)
    assert all(known in str(caught.value) for known in [*RULES, "nnm+"])


def test_nnm_before_a_rule_s_name(rng: np.random.Generator) -> None:
    x = rng.normal(size=(15, 3))
    assert rule_named("median") is median
    np.testing.assert_array_equal(rule_named("nnm+trimmed-mean")(x, 2).value, nnm(x, 2, then=trimmed_mean).value)
    np.testing.assert_array_equal(nnm(x, 2).value, nnm(x, 2, then=median).value)
    assert np.abs(nnm(x, 2).value - median(x, 2).value).max() > 1e-3  # control
    close(nnm(x, 2, then=nnm).value, nnm(mixed_rows(x, 2), 2).value)
