"""Every method against its paper's algorithm box, transcribed in ``tests/oracles``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.federation.settings import LocalTraining
from fl_bn.layers import HybridBatchNorm
from fl_bn.methods import METHODS, LayerReports
from fl_bn.moments import Moments, Running, ema, plain_average
from tests.federation import Federation, Samples, largest_deviation
from tests.networks import seeded_network
from tests.oracles import fbn as fbn_oracle
from tests.oracles import hbn as hbn_oracle
from tests.oracles.fedavg import Client, fedavg
from tests.oracles.fedbn import algorithm_1

C = 4


def draw(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.normal(2 * i, 1 + i, (m, C)) for i, m in enumerate(sizes)]


def start(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=C), rng.uniform(0.5, 2, C)


def reports(u: np.ndarray, s: np.ndarray, data: list[np.ndarray], momentum: float = 0.1) -> LayerReports:
    parts = [Moments.of(torch.from_numpy(x)) for x in data]
    return LayerReports(Running(torch.from_numpy(u), torch.from_numpy(s)), parts, momentum, 1.0)


def off(got: Running, want: tuple[np.ndarray, np.ndarray]) -> float:
    return max(float(np.abs(got.mean.numpy() - want[0]).max()), float(np.abs(got.var.numpy() - want[1]).max()))


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [(5, 5, 5), (3, 7, 5), (1, 2, 9)])
def test_fbn_algorithm_2(rng: np.random.Generator, sizes: tuple[int, ...], momentum: float) -> None:
    u, s = start(rng)
    data = draw(rng, sizes)
    printed = len(set(sizes)) == 1
    want = fbn_oracle.algorithm_2_unequal(u, s, data, momentum)
    if printed:
        np.testing.assert_allclose(fbn_oracle.algorithm_2(u, s, data, momentum), want, rtol=1e-12)
    got = reports(u, s, data, momentum)
    method = METHODS["fbn"](momentum=momentum)
    assert off(method.combine(got), want) < 1e-12
    assert not off(ema(got.shared, plain_average(got.parts), momentum), want) < 1e-12
    uniform = [Moments(1000, part.mean, part.var) for part in got.parts]  # 1/n each: right for equal batches, but for Bessel
    assert not off(method.combine(LayerReports(got.shared, uniform, momentum, 1.0)), want) < 1e-12


def test_hbn_forward_equations_9_and_10(rng: np.random.Generator) -> None:
    layer = HybridBatchNorm(C).double()
    x, p, (mean, var) = rng.normal(1, 2, (3, C, 2, 2)), rng.normal(size=C), start(rng)
    weight, bias = rng.normal(size=C), rng.normal(size=C)
    tensors = {"running_mean": mean, "running_var": var, "weight": weight, "bias": bias, "mixing_logit": p}
    layer.load_state_dict({k: torch.from_numpy(t) for k, t in tensors.items()})
    want = hbn_oracle.forward(x, mean, var, p, weight, bias, layer.eps)
    np.testing.assert_allclose(layer(torch.from_numpy(x)).detach(), want, rtol=1e-12, atol=1e-12)
    assert not np.allclose(layer.eval()(torch.from_numpy(x)).detach(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lam", [0.01, 1.0])
def test_hbn_global_statistics_equations_8_and_11(rng: np.random.Generator, lam: float) -> None:
    u, s = start(rng)
    data = draw(rng, (3, 7, 5))
    want = hbn_oracle.global_statistics(u, s, data, lam)
    got = reports(u, s, data)
    assert off(METHODS["hbn"](lam=lam).combine(got), want) < 1e-12
    assert not off(ema(got.shared, plain_average(got.parts), lam), want) < 1e-12


def batches(clients: list[Samples], sizes: int) -> tuple[list[list[np.ndarray]], list[Client]]:
    """Each client's samples in consecutive batches: as indices, and as tensors."""
    index = [np.array_split(np.arange(len(c)), sizes) for c in clients]
    like = torch.zeros((), dtype=torch.float64)
    return index, [[c.batch(i, like) for i in own] for c, own in zip(clients, index, strict=True)]


def test_fedavg_with_batch_norm(tiny_clients) -> None:  # type: ignore[no-untyped-def]
    clients = tiny_clients((6, 14, 10))
    index, tensors = batches(clients, 2)
    want = fedavg(seeded_network("plain", dtype=torch.float64), 3, tensors, [6, 14, 10], 0.1).state_dict()
    want = {k: t for k, t in want.items() if t.is_floating_point()}
    deviation = {}
    for name, weights in (("fedavg", None), ("uniform", [1.0, 1.0, 1.0]), ("fedbn", None)):
        federation = Federation(seeded_network("plain", dtype=torch.float64), METHODS[name if name != "uniform" else "fedavg"](), clients)
        for _ in range(3):
            federation.round(batches=index, settings=LocalTraining(7, steps=2), weights=weights)
        deviation[name] = largest_deviation(federation.server.state_dict(), want)
    assert deviation["fedavg"] < 1e-12
    assert not deviation["uniform"] < 1e-12
    assert not deviation["fedbn"] < 1e-12


@pytest.mark.parametrize("network", ["plain", "resnet"])
def test_fedbn_algorithm_1(network: str, tiny_clients) -> None:  # type: ignore[no-untyped-def]
    clients = tiny_clients((6, 14, 10))
    index, tensors = batches(clients, 2)
    net = seeded_network(network, dtype=torch.float64)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    norms = [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]
    deviation = {}
    for rule, bn in (("type", norms), ("name", [n for n in norms if "bn" in n])):
        want = algorithm_1(net, bn, T=6, E=2, users=tensors, η=0.1)
        federation = Federation(net, METHODS["fedbn"](), clients)
        for _ in range(3):
            federation.round(batches=index, settings=LocalTraining(7, steps=2), weights=[1.0, 1.0, 1.0])
        deviation[rule] = max(largest_deviation(federation.client(k).state_dict(), want[k].state_dict()) for k in range(3))
    assert deviation["type"] < 1e-12
    assert not deviation["name"] < 1e-12  # control: BatchNorm found by its name, of which there is none here
