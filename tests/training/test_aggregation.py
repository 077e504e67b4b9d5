"""The server's arithmetic: averages, server optimisers, and what never passes through them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.methods import METHODS, LayerReports
from tests.listed import listed
from tests.training.core import (
    SERVER_OPTIMIZERS,
    Drift,
    Moments,
    Running,
    average,
    combine,
    merge_drifts,
    pseudo_gradient,
    server_optimizer,
)

Named = dict[str, Tensor]


def replies(rng: np.random.Generator, n: int = 3) -> list[Named]:
    return [{"a": torch.from_numpy(rng.normal(size=(50, 7))).float(), "b": torch.from_numpy(rng.normal(size=9)).float()} for _ in range(n)]


def test_average_is_in_float64_by_name_and_weighted(rng: np.random.Generator) -> None:
    parts, weights = replies(rng), [3.0, 7.0, 5.0]
    mean = average(parts, weights)
    assert list(mean) == ["a", "b"]
    for name, got in mean.items():
        assert got.dtype is torch.float64
        want = sum(w * part[name].double().numpy() for w, part in zip(weights, parts, strict=True)) / 15
        np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)
        single = sum(w / 15 * part[name] for w, part in zip(weights, parts, strict=True))
        assert not np.allclose(single, want, rtol=1e-14, atol=1e-15)  # control: accumulated in float32
    permuted = [dict(reversed(part.items())) for part in parts]
    assert all(torch.equal(average(permuted, weights)[name], mean[name]) for name in mean)
    ones = average(parts, [1.0, 1.0, 1.0])
    assert not any(torch.allclose(ones[name], mean[name]) for name in mean)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 7.0]])
def test_sgd_with_rate_1_is_the_average_bit_for_bit(rng: np.random.Generator, weights: list[float], scale: float) -> None:
    optimizer, half, state = server_optimizer("fedavg", 1.0), server_optimizer("fedavg", 0.5), replies(rng, 1)[0]
    state = {k: t * scale for k, t in state.items()}
    for _ in range(4):
        mean = average(replies(rng, 2), weights)
        want = {k: t.float() for k, t in mean.items()}
        pseudo = pseudo_gradient(state, mean)
        got = {k: t.float() for k, t in optimizer.step(state, pseudo).items()}
        assert same(got, want)
        assert not same({k: t.float() for k, t in half.step(state, pseudo).items()}, want)
        state = got


def same(a: Named, b: Named) -> bool:
    return all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("name", [*SERVER_OPTIMIZERS])
def test_names_outside_the_gradient_never_enter_the_optimiser(rng: np.random.Generator, name: str) -> None:
    optimizer, state = server_optimizer(name), replies(rng, 1)[0]
    before = state["b"].clone()
    stepped = optimizer.step({**state, "running_mean": torch.ones(2)}, {"a": torch.ones(50, 7)})
    assert set(stepped) == {"a"}
    assert torch.equal(state["b"], before)
    assert not torch.equal(stepped["a"].float(), state["a"])


def test_the_rate_factor_is_the_rounds_own(rng: np.random.Generator) -> None:
    optimizer, state = server_optimizer("fedavg", 0.5), {"a": torch.zeros(1)}
    steps = [float(optimizer.step(state, {"a": torch.ones(1)}, factor)["a"]) for factor in (1.0, 0.1, 1.0)]
    assert steps == pytest.approx([-0.5, -0.05, -0.5])


def test_combine_keeps_layers_that_nobody_ran_and_weighs_steps_by_count() -> None:
    layers = {"one": nn.BatchNorm1d(1, momentum=0.3), "two": nn.BatchNorm1d(1)}
    shared = {k: Running(torch.zeros(1), torch.ones(1)) for k in layers}
    seen: list[LayerReports] = []

    def rule(reports: LayerReports) -> Running:
        seen.append(reports)
        return METHODS["fbn"](momentum=reports.momentum, report="all").combine(reports)

    def part(count: int) -> Moments:
        return Moments(count, torch.ones(1).double(), torch.ones(1).double())

    new = combine(rule, shared, [{"one": part(30)}, {"one": part(10), "two": part(0)}], [1, 5], layers)
    assert new["two"] is shared["two"]
    (only,) = seen
    assert (only.momentum, only.steps, [p.count for p in only.parts]) == (0.3, 2.0, [30, 10])
    assert new["one"].mean.dtype is torch.float64
    assert new["one"].mean.item() == pytest.approx(1 - 0.7**2)


@listed(
    "arguments",
    [
        ("rmsprop", 1.0), ("fedavg", 0.0), ("fedavgm", 1.0, 1.0), ("fedavg", 1.0, 0.5), ("fedacg", 0.5), ("fedadam", 1.0, 0.9, 1.0),
        ("fedyogi", 1.0, 0.9, 0.99, 0.0),
    ],
)  # fmt: skip
def test_server_optimizers_that_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match=arguments[0]):
        server_optimizer(*arguments)


def test_drift_names_the_layer_that_moved_most_or_diverged() -> None:
    old = {"a": Running(torch.zeros(2), torch.ones(2)), "b": Running(torch.zeros(1), torch.full((1,), 4.0))}
    new = {"a": Running(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])), "b": Running(torch.full((1,), 6.0), torch.full((1,), 8.0))}
    drift, diverged = Drift.between(old, new, eps=0.0), Drift.between(old, new | {"b": Running(torch.full((1,), torch.nan), torch.ones(1))})
    assert drift == Drift(largest=3.0, layer="b", min_var=0.5, growth=2.0)
    assert merge_drifts([Drift(1, "x", 0.1, 9), drift]) == Drift(3.0, "b", 0.1, 9)
    assert Drift.between({}, {}) is merge_drifts([]) is None
    merged = merge_drifts([drift, diverged])
    assert diverged is not None
    assert merged is not None
    assert diverged.layer == "b"  # plain max() answers with layer a
    assert math.isnan(merged.largest)
