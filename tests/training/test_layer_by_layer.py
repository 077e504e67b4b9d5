"""One client's walk through its network, layer by layer: what it sends, what it keeps in memory, what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Quantity
from fl_bn.federation.client_pass import in_order, layer_by_layer
from fl_bn.federation.local import measured
from fl_bn.methods import INPUTS, StatisticsPass
from tests.training.core import Moments, batch_norms, running_statistics
from tests.training.test_recalibration import LAYERS, network

MEMORY = 2**20


class Alone:
    """An exchange of one client, which gets what it sent, its variances unbiased. ``failing``: the exchange that is given up."""

    def __init__(self, failing: int = -1) -> None:
        self.batch, self.seconds, self.failing = 1, 0.0, failing
        self.asked: list[tuple[Key, Tensor, int]] = []
        self.closed: list[str] = []

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        if len(self.asked) == self.failing:
            raise ExchangeFailed("a client died")
        self.asked.append((key, local, count))
        mean, var = local.chunk(2)
        return Answer(torch.cat([mean, var * (count / (count - 1))]), count, 1)

    def close(self, error: str = "") -> None:
        self.closed.append(error)


def batches(sizes: tuple[int, ...] = (4, 3, 5)) -> Callable[[], Iterator[Tensor]]:
    rng = np.random.default_rng(5)
    held = [torch.from_numpy(rng.normal(i, 1 + i, (n, 3, 8, 8))) for i, n in enumerate(sizes)]
    return lambda: iter(held)


def walk(model: nn.Module, inputs: Callable[[], Any], exchange: Alone | None = None) -> dict[str, Moments]:
    problem, drawn = in_order(model, batch_norms(model), inputs, call, MEMORY)
    assert problem == ""
    return layer_by_layer(model, batch_norms(model), drawn, exchange or Alone(), call)


def call(model: nn.Module, x: Any) -> Any:
    return model(x)


def by_passes(model: nn.Module, inputs: Callable[[], Any]) -> dict[str, Moments]:
    """One layer more per pass."""
    found: dict[str, Moments] = {}
    for _ in batch_norms(model):
        found = measured(model, inputs(), StatisticsPass.for_exchange(INPUTS))
        for name, moments in found.items():
            layer = batch_norms(model)[name]
            layer.running_mean.copy_(moments.mean)  # type: ignore[union-attr]
            layer.running_var.copy_(moments.bessel())  # type: ignore[union-attr]
    return found


def same(a: dict[str, Moments], b: dict[str, Moments]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].count == b[k].count and torch.equal(a[k].mean, b[k].mean) and torch.equal(a[k].var, b[k].var) for k in a
    )


@pytest.mark.parametrize("name", LAYERS)
def test_it_finds_the_bits_of_as_many_passes_as_layers(name: str) -> None:
    inputs, exchange = batches(), Alone()
    found = walk(network(name), inputs, exchange)
    assert same(found, by_passes(network(name), inputs))
    assert not same(found, measured(network(name), inputs(), StatisticsPass.for_exchange(INPUTS)))  # control: one pass
    assert not same(found, by_passes(network(name), batches((4, 3))))  # control: a batch is missing
    assert [key for key, _, _ in exchange.asked] == [Key(layer, Quantity.STATISTICS) for layer in found]
    assert len(found) == LAYERS[name]
    assert exchange.closed == [""]


class Counting(nn.Module):
    """Counts the samples that pass each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.seen = [0, 0, 0, 0]

    def forward(self, x: Tensor) -> Tensor:
        for place, norm in enumerate(self.norms):
            self.seen[place] += len(x)
            x = torch.relu(norm(x))
        self.seen[3] += len(x)
        return x


def test_what_is_kept_is_computed_once() -> None:
    look = 2  # samples
    model, passes = Counting().double(), Counting().double()
    walk(model, batches())
    assert model.seen == [12 + look] * 4
    by_passes(passes, batches())
    assert passes.seen == [3 * 12] * 4


def test_the_limit_of_memory_counts_the_activations_of_all_batches() -> None:
    """Per sample three times the largest input of a layer, and the input of the network: 4 * 3 * 64 float64."""
    held = 12 * 4 * 3 * 64 * 8
    for memory, problem in ((held, ""), (held - 1, "GiB")):
        model = Counting().double()
        found, _ = in_order(model, batch_norms(model), batches(), call, memory)
        assert problem in found
        assert bool(found) is bool(problem)


@pytest.mark.parametrize("failing", [-1, 0, 2])
def test_nothing_of_the_model_changes_and_no_thread_is_left(failing: int) -> None:
    model = network("chain").train()
    before, threads = running_statistics(model), set(threading.enumerate())
    exchange = Alone(failing)
    if failing < 0:
        walk(model, batches(), exchange)
        assert exchange.closed == [""]
    else:
        with pytest.raises(ExchangeFailed):
            walk(model, batches(), exchange)
        assert exchange.closed == ["ExchangeFailed('a client died')"]
    after = running_statistics(model)
    assert all(torch.equal(before[k].mean, after[k].mean) and torch.equal(before[k].var, after[k].var) for k in before)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not set(threading.enumerate()) - threads


class Forked(nn.Module):
    """Batches of four samples take another way than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.left(x) if len(x) == 4 else self.right(x))


def test_batches_without_an_order_of_layers_give_the_exchange_up() -> None:
    exchange = Alone()
    with pytest.raises(ExchangeFailed, match="order"):
        walk(Forked().double(), batches(), exchange)
    assert "no fixed order" in exchange.closed[0]


def test_a_look_says_why_a_network_has_no_order() -> None:
    x, norm = torch.rand(4, 3, 8, 8), nn.BatchNorm2d(3)
    for model, inputs in ((nn.Sequential(norm, nn.ReLU(), norm), lambda: [x]), (nn.ReLU(), lambda: [x]), (norm, list)):
        assert in_order(model, batch_norms(model), inputs, call, MEMORY)[0]
    assert in_order(norm, batch_norms(norm), lambda: [x], call, MEMORY)[0] == ""  # control
