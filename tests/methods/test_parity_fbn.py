"""FBN equals centralised training that normalises with its running statistics. Controls: the plain average, uniform weights, one b."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS, LayerReports
from fl_bn.moments import Moments, Running, ema, plain_average, pool
from fl_bn.roles import Role, batch_norms
from tests.federation import Federation, Rule, largest_deviation, union
from tests.local import train
from tests.networks import seeded_network

SIZES, ROUNDS, RATE, EXACT = (3, 7, 5), 5, 0.1, 1e-11
MOMENTUM = 0.1  # torch's default
ALGORITHM_2 = METHODS["fbn"](momentum=MOMENTUM)
Clients = Callable[..., list[Samples]]


class Centralised(nn.BatchNorm2d):
    """Normalises with its running statistics, then lets torch update them."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), self.weight, self.bias, False, 0.0, self.eps)
        F.batch_norm(x.detach(), self.running_mean, self.running_var, None, None, True, self.momentum, self.eps)
        return out


def centralised(network: str) -> nn.Module:
    model = seeded_network(network, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = Centralised
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def plain(reports: LayerReports) -> Running:
    return ema(reports.shared, plain_average(reports.parts), reports.momentum)


def uniform(reports: LayerReports) -> Running:
    return ema(reports.shared, pool([Moments(1000, part.mean, part.var) for part in reports.parts]), reports.momentum)


def run(network: str, clients: list[Samples], rule: Rule | None, weights: list[float] | None = None) -> tuple[float, float, float]:
    """Largest deviation of (layer 1's statistics, the others' statistics, the weights) from centralised training, over all rounds."""
    reference, together = centralised(network), union(clients)
    model = seeded_network(network, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    federation = Federation(model, ALGORITHM_2, clients, rule)
    x, y = together.batch(np.arange(len(together)), torch.zeros((), dtype=torch.float64))
    first = next(iter(batch_norms(reference)))
    worst = [0.0, 0.0, 0.0]
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    for number in range(1, ROUNDS + 1):
        federation.round(number, rate=RATE, weights=weights)
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        state, role = reference.state_dict(), federation.role
        statistics = {k: state[k] for k in role if role[k] is Role.STATISTIC}
        groups = (
            {k: t for k, t in statistics.items() if k.rpartition(".")[0] == first},
            {k: t for k, t in statistics.items() if k.rpartition(".")[0] != first},
            {k: state[k] for k in role if k not in statistics},
        )
        worst = [max(w, largest_deviation(federation.server.state_dict(), g)) for w, g in zip(worst, groups, strict=True)]
    return worst[0], worst[1], worst[2]


@pytest.mark.parametrize("network", ["plain", "resnet"])
def test_statistics_and_weights_equal_centralised_training(network: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    exact = run(network, clients, None)
    assert max(exact) < EXACT, exact
    for rule in (plain, uniform):
        wrong = run(network, clients, rule)
        assert all(not deviation < EXACT for deviation in wrong), wrong
    unweighted = run(network, clients, None, [1.0, 1.0, 1.0])
    assert not unweighted[2] < EXACT, unweighted


def test_layer_1_equals_batch_norm_on_the_union_of_the_batches(tiny_clients: Clients) -> None:
    """``nn.BatchNorm2d`` itself, in training mode, fed with what the server's convolution makes of all clients' images."""
    clients = tiny_clients(SIZES)
    x, _ = union(clients).batch(np.arange(sum(SIZES)), torch.zeros((), dtype=torch.float64))
    deviation = {}
    for name, rule in (("fbn", None), ("plain", plain), ("uniform", uniform)):
        federation = Federation(seeded_network("plain", dtype=torch.float64), ALGORITHM_2, clients, rule)
        norm, worst = nn.BatchNorm2d(4, dtype=torch.float64), 0.0
        for number in range(1, ROUNDS + 1):
            norm(federation.server[0](x))
            federation.round(number)
            layer = federation.server[1]
            worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(statistics_of(layer), statistics_of(norm), strict=True)))
        deviation[name] = worst
    assert deviation["fbn"] < EXACT, deviation
    assert not deviation["plain"] < EXACT
    assert not deviation["uniform"] < EXACT


def statistics_of(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.running_mean, layer.running_var


def test_several_local_steps(tiny_clients: Clients) -> None:
    """E = 5: the moments reported are those of every batch seen, and the momentum is that of five observations."""
    clients, settings = tiny_clients((10, 20, 15)), LocalTraining(4, steps=5)
    method = METHODS["fbn"](momentum=MOMENTUM, report="all")
    federation = Federation(seeded_network("plain", dtype=torch.float64), method, clients)
    before = {k: t.clone() for k, t in federation.server.state_dict().items()}
    index = [np.array_split(np.arange(len(c)), 5) for c in clients]
    inputs: dict[str, list[Tensor]] = {"1": [], "5": []}
    for client, own in zip(clients, index, strict=True):
        model = federation.client(0)
        first = {name: len(seen) for name, seen in inputs.items()}
        for name, seen in inputs.items():
            model.get_submodule(name).register_forward_pre_hook(partial(record, seen))
        result = train(model, client, own, settings, RATE, federation.method)
        for name, seen in inputs.items():
            data = torch.cat(seen[first[name] :])
            assert result.moments[name].count == len(data)
            assert float((result.moments[name].mean - data.mean(0)).abs().max()) < EXACT
            assert float((result.moments[name].var - data.var(0, unbiased=False)).abs().max()) < EXACT
            last = seen[-1]
            assert not float((result.moments[name].var - last.var(0, unbiased=False)).abs().max()) < EXACT  # control: the last batch
    server = copy.deepcopy(federation.server)
    federation.round(batches=index, settings=settings, rate=RATE)
    for name, seen in inputs.items():
        data, layer = torch.cat(seen), federation.server.get_submodule(name)

        def off(b: float, data: Tensor = data, layer: nn.Module = layer, name: str = name) -> float:
            var = (1 - b) * before[f"{name}.running_var"] + b * data.var(0)
            mean = (1 - b) * before[f"{name}.running_mean"] + b * data.mean(0)
            return max(float((layer.running_var - var).abs().max()), float((layer.running_mean - mean).abs().max()))

        assert off(1 - 0.9**5) < EXACT
        assert not off(0.1) < EXACT  # control: the momentum of one batch
    assert largest_deviation(server.state_dict(), before) == 0  # deepcopy shares nothing


def record(seen: list[Tensor], _: nn.Module, args: tuple[Tensor]) -> None:
    x = args[0].detach()
    seen.append(x.movedim(1, -1).reshape(-1, x.shape[1]).clone())


def test_variance_stays_positive_whatever_is_reported() -> None:
    shared = Running(torch.zeros(2), torch.ones(2))
    nothing = [Moments(4, torch.zeros(2), torch.zeros(2))] * 3
    assert (METHODS["fbn"](momentum=0.1, report="all").combine(LayerReports(shared, nothing, 0.1, 5.0)).var >= 0.9**5 - 1e-12).all()


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.5])
def test_momentum_out_of_range(momentum: float) -> None:
    with pytest.raises(ValueError, match=r"momentum must be in \(0, 1\]"):
        METHODS["fbn"](momentum=momentum)
