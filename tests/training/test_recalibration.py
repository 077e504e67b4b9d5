"""Re-calibration in plain torch: layers 1..p are exact after pass p, all after L. Layer by layer over Flower: tests/flower."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.recalibration import recalibrate
from tests.federation import union
from tests.networks import Wired, seeded_network

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
