"""Rows of any kind give the same value, and are only read; what no rule takes is refused; how names are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_bn.robust import PREAGGREGATIONS, RULES, Rule, bucketing, krum, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from tests.listed import listed
from tests.refusals import naming
from tests.robust.cases import NAMES

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
        assert (got.report.rejected, got.report.far) == (want.report.rejected, want.report.far)
        for row, was in zip(rows, before, strict=True):
            np.testing.assert_array_equal(row, was)


@listed("name", ["mean", "nnm+median", "krum"])
def test_rows_in_bfloat16_are_combined_in_float32(name: str, rng: np.random.Generator) -> None:
    rows = torch.from_numpy(numbers(rng)).bfloat16()
    got, want = rule_named(name)(rows, F), rule_named(name)(rows.float(), F)
    assert torch.equal(got.value, want.value.bfloat16())


def test_the_value_is_nobodys_memory(rng: np.random.Generator) -> None:
    x = numbers(rng)
    assert not np.shares_memory(rule_named("krum")(x, F).value, x)
    assert not median([torch.ones(3, requires_grad=True) for _ in range(5)], 1).value.requires_grad


HALF = ["median", "trimmed-mean", "geometric-median", "centered-clipping"]
FEWEST: list[tuple[Rule, int, int]] = [  # a rule, f, and the fewest rows that it takes
    *((rule_named(name), f, 2 * f + 1) for name in (*HALF, "nnm+mean", "nnm+median") for f in (1, 4)),
    *((rule_named(name), f, 2 * f + 3) for name in ("krum", "multi-krum", "nnm+krum", "nnm+multi-krum") for f in (0, 1, 3)),
    *((partial(bucketing, size=size), f, 2 * f * size + 1) for f in (1, 2) for size in (1, 2, 3)),
    (partial(bucketing, then=krum), 1, 9),  # five buckets of two: the rule after it has its own bound
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


@listed("name", ["", "medain", "nnm", "nnm+", "median+nnm", "krum+median"])
def test_unknown_names(name: str) -> None:
    with naming(repr(name)) as caught:
        rule_named(name)
    assert all(known in str(caught.value) for known in [*RULES, *PREAGGREGATIONS])


def test_names_are_read_from_left_to_right(rng: np.random.Generator) -> None:
    x = rng.normal(size=(15, 3))
    assert rule_named("median") is median
    np.testing.assert_array_equal(rule_named("nnm+trimmed-mean")(x, 2).value, nnm(x, 2, then=trimmed_mean).value)
    by_hand = bucketing(x, 2, then=partial(nnm, then=multi_krum)).value
    np.testing.assert_array_equal(rule_named("bucketing+nnm+multi-krum")(x, 2).value, by_hand)
    assert np.abs(nnm(x, 2, then=partial(bucketing, then=multi_krum)).value - by_hand).max() > 1e-3  # control
    np.testing.assert_array_equal(nnm(x, 2).value, nnm(x, 2, then=median).value)
    np.testing.assert_array_equal(bucketing(x, 2).value, bucketing(x, 2, then=median, size=2, seed=0).value)
