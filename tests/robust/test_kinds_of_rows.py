"""Rows of any kind give the same value, which looks like one of them; and they are only read."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust import median, rule_named
from tests.listed import listed
from tests.robust.cases import NAMES, close, same_report

SHAPES = {"scalar": (), "none": (0,), "odd": (3, 2, 1), "wide": (150,), "matrix": (7, 11), "end": (2, 0, 3)}
D, N, F = 234, 9, 1
KINDS = ["matrix", "vectors", "layers", "torch matrix", "torch vectors", "torch layers", "read-only", "strided", "transposed", "reordered"]


def layers_of(row: np.ndarray) -> dict[str, np.ndarray]:
    made, start = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        made[name], start = row[start : start + size].reshape(shape), start + size
    return made


def flat(value: Any) -> np.ndarray:
    """Any value as a float64 vector, layers in the order of SHAPES."""
    if isinstance(value, dict):
        return np.concatenate([flat(value[name]) for name in SHAPES])
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
    if kind == "reordered":  # the same names in another order
        listed = [layers_of(row) for row in x]
        return [listed[0], *(dict(reversed(layers.items())) for layers in listed[1:])]
    if kind.startswith("torch"):
        rows = of_kind(kind.removeprefix("torch "), x)
        if isinstance(rows, np.ndarray):
            return torch.from_numpy(rows)
        return [{k: torch.from_numpy(v) for k, v in r.items()} if isinstance(r, dict) else torch.from_numpy(r) for r in rows]
    return list(x) if kind == "vectors" else [layers_of(row) for row in x]


def numbers(rng: np.random.Generator, dtype: str = "float64") -> np.ndarray:
    x: np.ndarray = rng.normal(size=(N, D)).astype(dtype)
    x[4] *= 100
    return x


def alike(value: Any, row: Any) -> bool:
    """Type, dtype, shape, device and names."""
    if isinstance(row, dict):
        return isinstance(value, dict) and list(value) == list(row) and all(alike(value[k], row[k]) for k in row)
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


@listed("first", [torch.bfloat16, torch.float32, torch.float64])
@listed("second", [torch.bfloat16, torch.float32, torch.float64])
@listed("name", ["mean", "nnm+median", "krum"])
def test_layers_may_have_a_dtype_each(name: str, first: torch.dtype, second: torch.dtype, rng: np.random.Generator) -> None:
    """As in a network in bfloat16 whose batch normalisation counts in float32."""
    rows = [{"a": torch.from_numpy(a[:20]).to(first), "b": torch.from_numpy(a[20:]).to(second)} for a in numbers(rng)]
    got = rule_named(name)(rows, F)
    want = rule_named(name)(torch.stack([torch.cat([row["a"].double(), row["b"].double()]) for row in rows]), F)
    assert alike(got.value, rows[0])
    digits = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-13}
    close(got.value["a"], want.value[:20], digits[first])
    close(got.value["b"], want.value[20:], digits[second])


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
