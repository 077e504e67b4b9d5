"""The server's step at a rate of 1 is the average, and what drift and combination of statistics say.

The optimizers are compared with their papers in tests/oracles.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.methods import METHODS, LayerReports
from tests.training.core import Drift, Moments, Running, average, combine, difference, server_optimizer

Named = dict[str, Tensor]


def replies(rng: np.random.Generator, n: int = 3) -> list[Named]:
    return [{"a": torch.from_numpy(rng.normal(size=(50, 7))).float(), "b": torch.from_numpy(rng.normal(size=9)).float()} for _ in range(n)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 7.0]])
def test_sgd_with_rate_1_is_the_average_bit_for_bit(rng: np.random.Generator, weights: list[float], scale: float) -> None:
    optimizer, half, state = server_optimizer("fedavg", 1.0), server_optimizer("fedavg", 0.5), replies(rng, 1)[0]
    state = {k: t * scale for k, t in state.items()}
    for _ in range(4):
        mean = average(replies(rng, 2), weights)
        want = {k: t.float() for k, t in mean.items()}
        pseudo = {k: difference(state[k].double(), mean[k].clone(), state[k].dtype) for k in mean}
        got = {k: t.float() for k, t in optimizer.step(state, pseudo).items()}
        assert same(got, want)
        optimizer.step_within(state, mean, difference)  # the server's step, which takes the average
        assert same({k: t.float() for k, t in mean.items()}, want)
        assert not same({k: t.float() for k, t in half.step(state, pseudo).items()}, want)
        state = got


def same(a: Named, b: Named) -> bool:
    return all(torch.equal(a[k], b[k]) for k in b)


def test_drift_names_the_layer_that_moved_most_or_diverged() -> None:
    old = {"a": Running(torch.zeros(2), torch.ones(2)), "b": Running(torch.zeros(1), torch.full((1,), 4.0))}
    new = {"a": Running(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])), "b": Running(torch.full((1,), 6.0), torch.full((1,), 8.0))}
    drift, diverged = Drift.between(old, new, eps=0.0), Drift.between(old, new | {"b": Running(torch.full((1,), torch.nan), torch.ones(1))})
    assert drift == Drift(largest=3.0, layer="b", min_var=0.5, growth=2.0)
    assert Drift.between({}, {}) is None
    assert diverged is not None
    assert diverged.layer == "b"  # plain max() answers with layer a


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
