"""Re-calibration in plain torch: layers 1..p are exact after pass p, all after L; and one client's walk, layer by layer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn import convert
from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Quantity
from fl_bn.federation.client_pass import in_order, layer_by_layer
from fl_bn.methods import METHODS, Role
from tests.federation import random_samples, union
from tests.listed import listed
from tests.networks import Wired, seeded_network
from tests.refusals import naming
from tests.training.core import Moments, Running, Samples, batch_norms, recalibrate, running_statistics, to_input, why_not

Clients = Callable[..., list[Samples]]
EXACT = 1e-11  # relative to a layer's scale, in float64
LAYERS = {"chain": 4, "resnet": 5}


def chain() -> nn.Module:
    """Four BatchNorm layers, one after the other, the last of a linear layer's output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        convolutions = [
            part
            for before, after in ((3, 4), (4, 6), (6, 5))
            for part in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With running statistics that are wrong in every layer."""
    model = (chain() if name == "chain" else seeded_network(name)).to(dtype)
    for i, layer in enumerate(batch_norms(model).values()):
        layer.running_mean.fill_(0.3 + 0.1 * i)  # type: ignore[union-attr]
        layer.running_var.fill_(2.0 + i)  # type: ignore[union-attr]
    return model


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((3, 17, 8, 5))


def reference(model: nn.Module, data: Samples) -> dict[str, Running]:
    """One layer at a time, in the order in which the network calls them: its input for all data at once, then the layer is set."""
    model = copy.deepcopy(model).eval()
    x = to_input(data.x, next(model.parameters()).dtype)
    order: list[nn.Module] = []
    handles = [layer.register_forward_pre_hook(lambda layer, _: order.append(layer)) for layer in batch_norms(model).values()]
    model(x)
    for handle in handles:
        handle.remove()
    for layer in order:
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))  # type: ignore[misc]
        with torch.no_grad():
            model(x)
            values = seen[0].transpose(0, 1).flatten(1)  # (C, everything else)
            layer.running_mean.copy_(values.mean(1))  # type: ignore[operator,union-attr]
            layer.running_var.copy_(values.var(1))  # type: ignore[operator,union-attr]
        handle.remove()
    return running_statistics(model)


def off(found: dict[str, Running], true: dict[str, Running]) -> dict[str, float]:
    """Largest relative distance per layer."""
    return {
        name: max(
            float((found[name].mean - true[name].mean).abs().max() / true[name].var.sqrt().max()),
            float(((found[name].var - true[name].var) / true[name].var).abs().max()),
        )
        for name in true
    }


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_the_unions_statistics_after_one_pass_per_layer(name: str, clients: list[Samples]) -> None:
    model = network(name)
    weights = {k: t.clone() for k, t in model.state_dict().items() if "running" not in k}
    true = reference(model, union(clients))
    before = off(running_statistics(model), true)
    made = recalibrate(model, clients)
    distances = off(running_statistics(model), true)
    assert len(distances) == LAYERS[name]
    assert max(distances.values()) < EXACT, distances
    assert min(before.values()) > 1e-2  # control: it was wrong everywhere
    wrong = off(running_statistics(model), reference(model, union(clients[:-1])))
    assert min(wrong.values()) > 1e-6  # control: a client is missing
    assert [one.number for one in made] == list(range(1, len(made) + 1))
    assert all(torch.equal(model.state_dict()[k], t) for k, t in weights.items())


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_pass_p_makes_layers_1_to_p_exact_and_no_further(passes: int, clients: list[Samples]) -> None:
    model = network("chain")
    true = reference(model, union(clients))
    made = recalibrate(model, clients, passes)
    distances = list(off(running_statistics(model), true).values())
    assert len(made) == passes
    assert max(distances[:passes]) < EXACT
    assert min(distances[passes:]) > 1e-4, distances  # control: a layer needs those below it
    for one in made:  # what was exact before a pass does not move in it
        moved = [movement.mean for movement in one.movements]
        assert max(moved[: one.number - 1], default=0.0) == 0.0
        assert moved[one.number - 1] > 0.0


def backwards() -> nn.Module:
    """Register a chain's layers from the last to the first, the worst order for passes that go by it."""
    parts = {f"layer{number}": layer for number, layer in reversed(list(enumerate(chain())))}

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for name in reversed(parts):
            x = net.get_submodule(name)(x)
        return x

    return Wired(forward, **parts).double()


def test_a_network_that_registers_its_layers_in_another_order_takes_more_passes(clients: list[Samples]) -> None:
    model = backwards()
    true = reference(model, union(clients))
    made = recalibrate(model, clients)
    assert LAYERS["chain"] < len(made) <= 2 * LAYERS["chain"]
    assert max(off(running_statistics(model), true).values()) < EXACT
    fewer = backwards()
    recalibrate(fewer, clients, LAYERS["chain"])
    assert max(off(running_statistics(fewer), true).values()) > 1e-4  # control: as many as in order are not enough


NOBODY = [Samples(torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int64))]


@listed(
    ("model", "clients", "word"),
    [
        pytest.param(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), [random_samples(4)], "", id="no BatchNorm"),
        pytest.param(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), [random_samples(4)], "", id="no statistics"),
        pytest.param(nn.Sequential(nn.BatchNorm2d(3)), [], "sample", id="no client"),
        pytest.param(nn.Sequential(nn.BatchNorm2d(3)), NOBODY, "sample", id="no sample"),
    ],
)
def test_what_cannot_be_recalibrated_is_refused(model: nn.Module, clients: list[Samples], word: str) -> None:
    with naming(word):
        recalibrate(model, clients)


@listed("name", METHODS)
def test_methods_without_shared_statistics_are_refused_with_the_reason(name: str) -> None:
    method = METHODS[name]()
    converted = convert(seeded_network("cnn"), method)
    reason = why_not(converted, method)
    keeps = method.keeps(Role.STATISTIC) or method.local_in is not None
    assert bool(reason) == (not batch_norms(converted) or keeps)
    assert ("at the clients" in reason) == keeps
    assert bool(why_not(converted, method, trains=True)) == (not batch_norms(converted) or not method.shares(Role.STATISTIC))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_exact_already_is_left_after_one_pass(dtype: torch.dtype, clients: list[Samples]) -> None:
    model = network("resnet", dtype)
    recalibrate(model, clients)
    before = running_statistics(model)
    (only,) = recalibrate(model, clients)
    assert only.settled
    after = running_statistics(model)
    assert all(torch.equal(before[k].mean, after[k].mean) and torch.equal(before[k].var, after[k].var) for k in before)
    assert len(recalibrate(model, clients[:-1])) > 1  # control: other data


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


def test_the_limit_of_memory_counts_the_activations_of_all_batches_which_are_computed_once() -> None:
    """Per sample three times the largest input of a layer, and the input of the network: 4 * 3 * 64 float64."""
    held, seen = 12 * 4 * 3 * 64 * 8, []
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)).double()
    for memory, problem in ((held, ""), (held - 1, "GiB")):
        found, _ = in_order(model, batch_norms(model), batches(), call, memory)
        assert problem in found
        assert bool(found) is bool(problem)
    for layer in batch_norms(model).values():
        layer.register_forward_pre_hook(lambda layer, args: seen.append(len(args[0])))
    exchange = Alone()
    walk(model, batches(), exchange)
    assert sum(seen) == 3 * (12 + 2)  # all batches, and two samples of the look
    assert [key for key, _, _ in exchange.asked] == [Key(name, Quantity.STATISTICS) for name in "024"]


@pytest.mark.parametrize("failing", [-1, 0, 2])
def test_nothing_of_the_model_changes_and_no_thread_is_left(failing: int) -> None:
    model = network("chain").train()
    before, threads, exchange = running_statistics(model), set(threading.enumerate()), Alone(failing)
    with nullcontext() if failing < 0 else pytest.raises(ExchangeFailed):
        walk(model, batches(), exchange)
    assert exchange.closed == ["" if failing < 0 else "ExchangeFailed('a client died')"]
    after = running_statistics(model)
    assert all(torch.equal(before[k].mean, after[k].mean) and torch.equal(before[k].var, after[k].var) for k in before)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not set(threading.enumerate()) - threads


def test_a_network_without_an_order_of_layers_gives_the_exchange_up_or_says_why() -> None:
    exchange, norms = Alone(), {"left": nn.BatchNorm2d(3), "right": nn.BatchNorm2d(3)}
    with pytest.raises(ExchangeFailed):  # batches of four samples take another way than all others
        walk(Wired(lambda net, x: net.left(x) if len(x) == 4 else net.right(x), **norms).double(), batches(), exchange)
    assert "no fixed order" in exchange.closed[0]
    x, norm = torch.rand(4, 3, 8, 8), nn.BatchNorm2d(3)
    for model, inputs in ((nn.Sequential(norm, nn.ReLU(), norm), lambda: [x]), (nn.ReLU(), lambda: [x]), (norm, list)):
        assert in_order(model, batch_norms(model), inputs, call, MEMORY)[0]
    assert in_order(norm, batch_norms(norm), lambda: [x], call, MEMORY)[0] == ""  # control
