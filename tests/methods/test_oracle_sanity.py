"""The transcriptions of ``tests/oracles`` by themselves: their limits, and what their papers prove of them."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.local import Samples
from tests.federation import largest_deviation
from tests.networks import seeded_network
from tests.oracles import clipping, fedacg, fedopt, fedprox, fedsam, maintained_momentum, moon, scaffold
from tests.oracles.fedavg import Client, fedavg

SIZES = [6, 14, 10]
ALL = [[0, 1, 2]] * 3


def network() -> nn.Module:
    return seeded_network("plain", dtype=torch.float64)


@pytest.fixture
def data(tiny_clients) -> list[Client]:  # type: ignore[no-untyped-def]
    """Three clients with two batches each."""
    like = torch.zeros((), dtype=torch.float64)

    def split(client: Samples) -> Client:
        return [client.batch(i, like) for i in np.array_split(np.arange(len(client)), 2)]

    return [split(client) for client in tiny_clients((6, 14, 10))]


def floats(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in net.state_dict().items() if tensor.is_floating_point()}


def off(a: nn.Module, b: nn.Module) -> float:
    return largest_deviation(floats(a), floats(b))


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_without_strength_all_are_fedavg(data: list[Client], strength: float) -> None:
    plain = fedavg(network(), 3, data, SIZES, 0.1)
    others = {
        "fedprox": fedprox.algorithm_2(network(), ALL, data, SIZES, 0.1, strength),
        "moon": moon.algorithm_1(network(), ALL, data, SIZES, 0.1, strength, 0.5, "9")[0],
        "momentum": maintained_momentum.fedavg(network(), ALL, data, SIZES, 0.1, strength, "local"),
    }
    if strength:
        others["fedsam"] = fedsam.algorithm_1(network(), ALL, data, SIZES, 0.1, strength)
    else:
        others["fedsam"] = fedsam.algorithm_1(network(), ALL, data, SIZES, 0.1, 1e-15)
        others["scaffold"] = scaffold.algorithm_1(network(), ALL[:1], data, SIZES, 0.1, 2).x  # in its first round all variates are 0
        plain_round = fedavg(network(), 1, data, SIZES, 0.1)
        assert off(others.pop("scaffold"), plain_round) < 1e-12
    for name, other in others.items():
        assert (off(other, plain) < 1e-11) == (strength == 0), name


def test_moon_has_no_term_in_a_first_round_and_one_after(data: list[Client]) -> None:
    largest = moon.algorithm_1(network(), [[0, 1], [2]], data, SIZES, 0.1, 1.0, 0.5, "9")[1]
    assert largest == 0
    assert moon.algorithm_1(network(), [[0, 1], [1]], data, SIZES, 0.1, 1.0, 0.5, "9")[1] > 1e-4
    z, other = torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(3, 5).requires_grad_(), torch.eye(3, 5, dtype=torch.float64)
    con = moon.ℓ_con(z, other, other, 0.5)  # two equal models: a constant, so the authors' round without previous models is the same
    assert math.isclose(float(con.detach()), math.log(2))
    assert float(torch.autograd.grad(con, z)[0].abs().max()) < 1e-15


def squares(curvature: float, optimum: float) -> Client:
    """f_i(w) = curvature / 2 (w - optimum)^2 as one batch of one sample for a network of one weight."""
    a = math.sqrt(curvature)
    return [(torch.tensor([[a]], dtype=torch.float64), torch.tensor([[a * optimum]], dtype=torch.float64))] * 5


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean() / 2


CURVED = ((1.0, -1.0), (4.0, 2.0), (2.0, 5.0))
BEST = sum(a * b for a, b in CURVED) / sum(a for a, _ in CURVED)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_reaches_the_optimum_and_fedavg_does_not(option: int) -> None:
    clients = [squares(a, b) for a, b in CURVED]
    start = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    one = [client[:1] for client in clients]

    def scaffolded(S: list[list[int]], weights: list[int]) -> float:  # noqa: N803
        run = scaffold.algorithm_1(copy.deepcopy(start), S, clients, weights, 0.1, option, one, half_square)
        assert abs(float(sum(run.c).detach())) < 1e-8  # c is the gradient of the mean of the f_i
        return abs(float(run.x.weight.detach()) - BEST)

    plain = fedprox.algorithm_2(copy.deepcopy(start), ALL * 10, clients, [1, 1, 1], 0.1, 0.0, half_square)
    assert abs(float(plain.weight.detach()) - BEST) > 0.02
    assert scaffolded(ALL * 10, [1, 1, 1]) < 1e-8
    assert scaffolded([[0, 1], [1, 2], [0, 2]] * 30, [1, 1, 1]) < 1e-8  # under sampling, too
    # Control variates are averaged plainly, so it is the plain mean of the f_i that is minimised, however models are weighted.
    assert scaffolded(ALL * 15, [1, 5, 2]) < 1e-8


def test_fedopt_in_its_limits() -> None:
    rng = np.random.default_rng(0)
    x, steps = rng.normal(size=5), rng.normal(size=(4, 5))
    want = x + np.cumsum(steps, 0)

    def run(server) -> np.ndarray:  # type: ignore[no-untyped-def]
        at, seen = x, []
        for step in steps:
            at = server.step(at, step)
            seen.append(at)
        return np.stack(seen)

    np.testing.assert_allclose(run(fedopt.FedAvgM(1.0, 0.0)), want, atol=1e-12)
    for kind in ("fedadagrad", "fedadam", "fedyogi"):
        huge = fedopt.Algorithm2(kind, 2e9, 0.0, 0.99, 1e9)  # √v ≈ τ where v_{-1} = τ² is all there is, so η = 2τ is FedAvg
        huge.β_2 = 1.0 if kind != "fedadagrad" else huge.β_2
        np.testing.assert_allclose(run(huge), want, atol=1e-6)
        signs = fedopt.Algorithm2("fedadam", 0.1, 0.0, 0.0, 1e-12)  # sign descent
        np.testing.assert_allclose(run(signs), x + 0.1 * np.cumsum(np.sign(steps), 0), atol=1e-9)
    np.testing.assert_allclose(fedopt.Δ(x, [x + 1, x + 4], [1, 2]), np.full(5, 3.0))


def test_fedacg_without_decay_is_fedavg_and_with_it_nesterovs() -> None:
    clients = [lambda θ, b=b: θ - 0.3 * (θ - b) for b in (1.0, 4.0)]
    start = np.array([0.0])
    want, θ = [], start
    for _ in range(4):
        θ = θ + 0.3 * (3.0 - θ)  # the optimum with weights 1 and 2 is 3
        want.append(θ)
    np.testing.assert_allclose(fedacg.algorithm_1(start, 4, clients, [1, 2], 0.0), want)
    accelerated = fedacg.algorithm_1(start, 60, clients, [1, 2], 0.5)
    assert abs(accelerated[3] - 3) < abs(want[3] - 3)
    assert abs(accelerated[-1] - 3) < 1e-9
    y = before = start  # Nesterov's: y = θ + λ (θ - θ_before), θ = y - η ∇F(y)
    for seen in accelerated[:4]:
        after = y - 0.3 * (y - 3.0)
        y, before = after + 0.5 * (after - before), after
        np.testing.assert_allclose(after, seen)


def test_clipping_bounds_what_it_says() -> None:
    rng = np.random.default_rng(0)
    W, G = ([rng.normal(size=s) for s in ((4, 3, 2, 2), (4,), (5, 4))] for _ in range(2))  # noqa: N806
    clipped = clipping.by_norm(G, 1.0)
    assert math.isclose(math.sqrt(sum(float((g**2).sum()) for g in clipped)), 1.0)
    assert all(np.array_equal(a, b) for a, b in zip(clipping.by_norm(G, 1e9), G, strict=True))
    assert max(float(np.abs(g).max()) for g in clipping.by_value(G, 0.3)) == 0.3
    for w, g, before in zip(W, clipping.agc(W, G, 0.1), G, strict=True):
        for i in range(len(w)) if w.ndim > 1 else [slice(None)]:
            assert clipping.norm(g[i]) <= 0.1 * clipping.norm(w[i]) * (1 + 1e-12) < clipping.norm(before[i])
    zero = clipping.agc([np.zeros((1, 2))], [np.ones((1, 2))], 0.1)[0]
    assert math.isclose(clipping.norm(zero), 0.1 * 1e-3)  # ε: weights of 0 are not stuck
