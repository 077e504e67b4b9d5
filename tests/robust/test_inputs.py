"""Rows of any kind give the same value, and are only read; what no rule takes is refused; how names are read."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust import PREAGGREGATIONS, RULES, Rule, bucketing, krum, mean, median, multi_krum, nnm, rule_named, trimmed_mean
from tests.listed import listed
from tests.refusals import naming
from tests.robust.cases import NAMES, same_report

F = 1
KINDS = ["matrix", "vectors", "torch matrix", "torch vectors", "read-only", "strided", "transposed"]


def flat(value: Any) -> np.ndarray:
    """Any value as a float64 vector."""
    return (value.double().numpy() if isinstance(value, Tensor) else np.asarray(value, np.float64)).reshape(-1)


def of_kind(kind: str, x: np.ndarray) -> Any:
    """``x`` (n, d) as rows of this kind."""
    if kind == "matrix":
        return x
    if kind == "read-only":
        x.setflags(write=False)
        return list(x)
    if kind == "strided":
        return list(np.repeat(x, 3, axis=1)[:, ::3])
    if kind == "transposed":
        return np.asfortranarray(x)
    if kind.startswith("torch"):
        rows = of_kind(kind.removeprefix("torch "), x)
        return torch.from_numpy(rows) if isinstance(rows, np.ndarray) else [torch.from_numpy(row) for row in rows]
    return list(x)


def numbers(rng: np.random.Generator, dtype: str = "float64") -> np.ndarray:
    x: np.ndarray = rng.normal(size=(9, 234)).astype(dtype)
    x[4] *= 100
    return x


def alike(value: Any, row: Any) -> bool:
    """Type, dtype, shape and device."""
    if isinstance(row, Tensor):
        return isinstance(value, Tensor) and (value.dtype, value.shape, value.device) == (row.dtype, row.shape, row.device)
    return isinstance(value, np.ndarray) and (value.dtype, value.shape) == (row.dtype, row.shape)


@listed("name", NAMES)
@listed(("dtype", "poison"), [("float32", 1.0), ("float64", 0.0), ("float32", np.nan)])
def test_all_kinds_agree_and_are_only_read(name: str, dtype: str, poison: float, rng: np.random.Generator) -> None:
    x, rule = numbers(rng, dtype), rule_named(name)
    x[2, 5] = poison
    want = rule(x.copy(), F)
    for kind in KINDS:
        rows = of_kind(kind, x.copy())
        before = copy.deepcopy(rows)
        got = rule(rows, F)
        np.testing.assert_array_equal(flat(got.value), flat(want.value))
        assert alike(got.value, rows[0])
        same_report(got.report, want.report)
        for row, was in zip(rows, before, strict=True):
            np.testing.assert_array_equal(flat(row), flat(was))


@listed("name", ["mean", "nnm+median", "krum"])
def test_rows_in_bfloat16_are_combined_in_float32(name: str, rng: np.random.Generator) -> None:
    rows = torch.from_numpy(numbers(rng)).bfloat16()
    got, want = rule_named(name)(rows, F), rule_named(name)(rows.float(), F)
    assert alike(got.value, rows[0])
    assert torch.equal(got.value, want.value.bfloat16())


def test_the_value_is_nobodys_memory(rng: np.random.Generator) -> None:
    x = numbers(rng)
    assert not np.shares_memory(rule_named("krum")(x, F).value, x)
    assert not median([torch.ones(3, requires_grad=True) for _ in range(5)], 1).value.requires_grad


# what is refused

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


@listed("name", [*RULES, "nnm+median", "bucketing+median"])
def test_f_is_a_whole_number(name: str, rng: np.random.Generator) -> None:
    for f in (-1, True, 1.0, 0.5, np.float64(1), np.bool_(True)):
        with naming(repr(f)):
            rule_named(name)(np.zeros((9, 2)), f)  # type: ignore[arg-type]
    x = rng.normal(size=(9, 2))
    np.testing.assert_array_equal(rule_named(name)(x, np.int64(2)).value, rule_named(name)(x, 2).value)


NO_ROWS: dict[str, tuple[Any, str]] = {
    "none": (np.zeros((0, 4)), "at least 1"),
    "none finite": (np.full((5, 2), np.nan), "at least 1"),
    "of other lengths": ([np.zeros(3), np.zeros(4)], "same shape"),
    "of other shapes": ([np.zeros(3), np.zeros((3, 1))], "same shape"),
    "dicts": ([{"a": np.zeros(3)}, {"a": np.zeros(3)}], "rows must be vectors"),
    "whole numbers": (np.zeros((2, 3), dtype=int), "rows must be vectors"),
    "of matrices": (np.zeros((2, 3, 4)), "rows must be vectors"),
}


@listed("case", NO_ROWS)
@listed("name", ["mean", "median", "nnm+median"])
def test_rows_are_finite_vectors_of_one_length(name: str, case: str) -> None:
    rows, word = NO_ROWS[case]
    with naming(word):
        rule_named(name)(rows, 0)


@listed("name", ["", "medain", "nnm", "nnm+", "+median", "median+nnm", "nnm+bucketing", "NNM+median", "nnm + median", "krum+median"])
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
