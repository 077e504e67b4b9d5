"""Rows of any kind give the same value, which looks like one of them; and they are only read."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust import median, rule_named
from tests.listed import listed
from tests.robust.cases import NAMES, same_report

D, N, F = 234, 9, 1
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
    x: np.ndarray = rng.normal(size=(N, D)).astype(dtype)
    x[4] *= 100
    return x


def alike(value: Any, row: Any) -> bool:
    """Type, dtype, shape and device."""
    if isinstance(row, Tensor):
        return isinstance(value, Tensor) and (value.dtype, value.shape, value.device) == (row.dtype, row.shape, row.device)
    return isinstance(value, np.ndarray) and (value.dtype, value.shape) == (row.dtype, row.shape)


@listed("name", NAMES)
@listed("dtype", ["float32", "float64"])
def test_all_kinds_agree(name: str, dtype: str, rng: np.random.Generator) -> None:
    x, rule = numbers(rng, dtype), rule_named(name)
    want = rule(x.copy(), F)
    for kind in KINDS:
        rows = of_kind(kind, x.copy())
        got = rule(rows, F)
        np.testing.assert_array_equal(flat(got.value), flat(want.value))
        assert alike(got.value, rows[0])
        same_report(got.report, want.report)


@listed("name", ["mean", "nnm+median", "krum"])
def test_rows_in_bfloat16_are_combined_in_float32(name: str, rng: np.random.Generator) -> None:
    rows = torch.from_numpy(numbers(rng)).bfloat16()
    got, want = rule_named(name)(rows, F), rule_named(name)(rows.float(), F)
    assert alike(got.value, rows[0])
    assert torch.equal(got.value, want.value.bfloat16())


@listed("name", NAMES)
@listed(("dtype", "poison"), [("float32", np.nan), ("float64", 0.0)])
def test_rows_are_only_read(name: str, poison: float, dtype: str, rng: np.random.Generator) -> None:
    x = numbers(rng, dtype)
    x[2, 5] = poison
    for kind in KINDS:
        rows = of_kind(kind, x.copy())
        before = copy.deepcopy(rows)
        assert np.isfinite(rule_named(name)(rows, F).report.distances).any()
        for row, was in zip(rows, before, strict=True):
            np.testing.assert_array_equal(flat(row), flat(was))


def test_the_value_is_nobodys_memory(rng: np.random.Generator) -> None:
    x = numbers(rng)
    value = rule_named("krum")(x, F).value
    assert not np.shares_memory(value, x)
    tensors = [torch.ones(3, requires_grad=True) for _ in range(5)]
    assert not median(tensors, 1).value.requires_grad
