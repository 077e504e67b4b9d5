"""Re-calibration in plain torch: all layers exact after L passes, layers 1..p after pass p and no more, however deep the network is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from fl_bn import convert
from fl_bn.methods import METHODS, Role
from tests.federation import random_samples, union
from tests.listed import listed
from tests.networks import seeded_network
from tests.refusals import naming
from tests.training.core import Running, Samples, batch_norms, recalibrate, running_statistics, to_input, why_not

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


class Backwards(nn.Module):
    """A chain that registers its layers from the last to the first, the worst order for passes that go by it."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in reversed(list(enumerate(chain()))):
            self.add_module(str(number), layer)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self._modules)):
            x = getattr(self, str(number))(x)
        return x


def test_a_network_that_registers_its_layers_in_another_order_takes_more_passes(clients: list[Samples]) -> None:
    model = Backwards().double()
    true = reference(model, union(clients))
    made = recalibrate(model, clients)
    assert LAYERS["chain"] < len(made) <= 2 * LAYERS["chain"]
    assert max(off(running_statistics(model), true).values()) < EXACT
    fewer = Backwards().double()
    recalibrate(fewer, clients, LAYERS["chain"])
    assert max(off(running_statistics(fewer), true).values()) > 1e-4  # control: as many as in order are not enough


class ThinResNet50(ResNet):
    """All 53 BatchNorm layers of a ResNet-50, with a sixteenth of its channels, and for images of 16 by 16 pixels."""

    def __init__(self) -> None:
        super().__init__(Bottleneck, [3, 4, 6, 3])
        self.maxpool, self.fc = nn.Identity(), nn.Linear(512 * Bottleneck.expansion // 16, 10)

    def _make_layer(self, block: Any, planes: int, *blocks: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 16, *blocks, **options)


@pytest.mark.slow
def test_the_errors_of_a_deep_network_do_not_multiply() -> None:
    """A fresh network: where each pass changes all layers, float32 overflows on the way."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = ThinResNet50()
    every = copy.deepcopy(model)
    clients = [random_samples(8, size=16, seed=seed) for seed in range(2)]
    assert len(recalibrate(model, clients)) == len(batch_norms(model)) == 53
    true = reference(model.double(), union(clients))
    assert max(off(running_statistics(model), true).values()) < 1e-2  # float32
    largest = 0.0
    for _ in range(10):  # control
        recalibrate(every, clients, 1)
        largest = max(largest, *(float(one.mean.abs().nan_to_num(torch.inf).max()) for one in running_statistics(every).values()))
    assert largest > 1e18


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
