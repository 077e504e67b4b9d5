"""HBN's statistics pass: exact in every layer, and repeated it reaches the statistics of the union."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.aggregation import combine, running_statistics
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.methods import METHODS, Method, StatisticsPass, StatisticsReport
from fl_bn.moments import Running
from fl_bn.roles import Role, batch_norms
from tests.federation import Federation, union
from tests.networks import seeded_network

SIZES, EXACT = (3, 7, 5), 1e-11
Clients = Callable[..., list[Samples]]


def after_passes(network: str, method: Method, clients: list[Samples], passes: int = 1) -> Federation:
    """Statistics-only exchanges with all clients: what brings the shared statistics up to the weights."""
    federation = Federation(seeded_network(network, dtype=torch.float64), method, clients)
    for number in range(passes):
        reports = [federation.measure(federation.client(i), i, number) for i in range(len(clients))]
        shared = running_statistics(federation.server)
        federation.store(combine(method.combine, shared, reports, [1] * len(clients), batch_norms(federation.server)))
    return federation


def off(federation: Federation, want: dict[str, Running]) -> dict[str, float]:
    layers = batch_norms(federation.server)
    return {
        k: max(float((layers[k].running_mean - s.mean).abs().max()), float((layers[k].running_var - s.var).abs().max()))
        for k, s in want.items()
    }


def images(clients: list[Samples]) -> Tensor:
    together = union(clients)
    return together.batch(np.arange(len(together)), torch.zeros((), dtype=torch.float64))[0]


@torch.no_grad()
def of_concatenated(network: str, clients: list[Samples]) -> dict[str, Running]:
    """Statistics of every layer's input on all data, the network as it stands, in evaluation mode."""
    model, want = seeded_network(network, dtype=torch.float64).eval(), {}

    def look(name: str, _: nn.Module, args: tuple[Tensor]) -> None:
        want[name] = Running(args[0].mean((0, 2, 3)), args[0].transpose(0, 1).flatten(1).var(1))

    for name, module in batch_norms(model).items():
        module.register_forward_pre_hook(partial(look, name))
    model(images(clients))
    return want


class Exact(nn.BatchNorm2d):
    """Normalises with the unbiased statistics of the batch that it is given, and keeps them."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean, self.running_var = x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


@torch.no_grad()
def of_union_throughout(network: str, clients: list[Samples]) -> dict[str, Running]:
    """Statistics of the union of the data, with every layer below normalised by its own statistics of the union."""
    model = seeded_network(network, dtype=torch.float64).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Exact
    model(images(clients))
    return running_statistics(model)


@pytest.mark.parametrize("network", ["plain", "resnet"])
def test_merged_statistics_are_those_of_the_concatenated_data_in_every_layer(network: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    want = of_concatenated(network, clients)
    shared = off(after_passes(network, METHODS["hbn"](lam=1.0, lower_layers="shared"), clients), want)
    assert max(shared.values()) < EXACT, shared
    first, *deeper = off(after_passes(network, METHODS["hbn"](lam=1.0, lower_layers="hybrid"), clients), want).values()
    assert first < EXACT
    assert not min(deeper) < EXACT  # control: batch statistics below make the merge exact in layer 1 alone


@pytest.mark.parametrize("name", ["fedavg", "hbn", "fbn"])
def test_as_many_passes_as_layers_reach_the_statistics_of_the_union(name: str, tiny_clients: Clients) -> None:
    """Re-calibration after training, of any method's network: pass p makes layers 1..p exact."""
    clients, depth = tiny_clients(SIZES), 2
    want = of_union_throughout("plain", clients)
    assert len(want) == depth
    layers = METHODS[name]().layer
    method = Method(name, layer=layers, report=StatisticsReport.PASS, combine=METHODS["hbn"](lam=1.0).combine)
    enough = off(after_passes("plain", method, clients, depth), want)
    assert max(enough.values()) < EXACT, enough
    first, second = off(after_passes("plain", method, clients, depth - 1), want).values()
    assert first < EXACT
    assert not second < EXACT  # control: one pass too few


@pytest.mark.parametrize("lam", [0.01, 1.0])
def test_one_round_moves_the_global_statistics_by_lam(lam: float, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    federation = Federation(seeded_network("plain", dtype=torch.float64), METHODS["hbn"](lam=lam, lower_layers="shared"), clients)
    federation.round()
    measured = of_concatenated("plain", clients)  # before training: with the weights and statistics that were sent down
    want = {k: Running(lam * s.mean, (1 - lam) + lam * s.var) for k, s in measured.items()}
    assert max(off(federation, want).values()) < EXACT
    other = {k: Running((1 - lam / 2) * s.mean, s.var) for k, s in measured.items()}
    assert not max(off(federation, other).values()) < EXACT


def test_the_mixing_logit_is_trained_stays_home_and_survives(tiny_clients: Clients) -> None:
    federation = Federation(seeded_network("plain", dtype=torch.float64), METHODS["hbn"](), tiny_clients(SIZES))
    federation.round(1)
    mixing = [k for k, role in federation.role.items() if role is Role.MIXING]
    assert mixing == ["1.mixing_logit", "5.mixing_logit"]
    after = [{k: kept[k].clone() for k in mixing} for kept in federation.kept]
    assert all(federation.server.state_dict()[k].abs().max() == 0 for k in mixing)
    assert all(float(kept[k].abs().max()) > 0 for kept in after for k in mixing)
    assert not torch.equal(after[0][mixing[0]], after[1][mixing[0]])
    for i, kept in enumerate(after):
        assert all(torch.equal(federation.client(i).state_dict()[k], kept[k]) for k in mixing)


def test_a_subset_is_seeded_and_not_the_first_k(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((40,))
    ordered = Samples(torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 3, 2, 2).contiguous(), client.y)
    model = nn.BatchNorm2d(3, dtype=torch.float64)
    how = StatisticsPass("shared", samples=10)

    def measured(seed: int) -> tuple[int, float, float]:
        found = statistics_pass(model, ordered, how, np.random.default_rng(seed))[""]
        return found.count, float(found.mean[0]), float(found.var[0])

    assert measured(1)[0] == 10 * 4
    assert measured(1) == measured(1)
    assert len({measured(seed) for seed in range(5)}) == 5
    first = float(ordered.batch(np.arange(10), model.weight)[0].mean())
    assert all(abs(measured(seed)[1] - first) > 1e-9 for seed in range(5))
    with_all = statistics_pass(model, ordered, StatisticsPass("shared", samples=100), np.random.default_rng(0))[""]
    assert with_all.count == 40 * 4


@pytest.mark.parametrize(
    ("options", "reason"), [({"lam": 0.0}, "lam"), ({"stat_samples": 1}, "stat_samples must be -1..0 or >= 2, but got 1")]
)
def test_options_out_of_range(options: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        METHODS["hbn"](**options)
    with pytest.raises(ValueError, match="lower_layers must be one of shared, hybrid, but got 'batch'"):
        METHODS["hbn"](lower_layers="batch")
