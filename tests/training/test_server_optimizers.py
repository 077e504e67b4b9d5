"""The server's optimizers against transcribed algorithms, and what never passes through them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.methods import METHODS, LayerReports
from tests.oracles import fedacg, fedopt
from tests.training.core import (
    SERVER_OPTIMIZERS,
    Drift,
    Moments,
    Running,
    ServerOptimizer,
    average,
    combine,
    difference,
    server_optimizer,
)

SIZES, ROUNDS = [3.0, 7.0, 5.0], 6
Vector = np.ndarray
Client = Callable[[Vector], Vector]


@pytest.fixture
def clients(rng: np.random.Generator) -> list[Client]:
    """Each makes three gradient steps towards an optimum of its own; one coordinate hardly moves, one moves far."""
    scale = np.array([1e-5, 1e-2, 1.0, 1.0, 30.0])

    def client(rate: float, optimum: Vector) -> Client:
        def steps(x: Vector) -> Vector:
            for _ in range(3):
                x = x - rate * (x - optimum)
            return x

        return steps

    return [client(rate, scale * rng.normal(size=5)) for rate in (0.3, 0.1, 0.2)]


def pseudo_gradient(weights: dict[str, torch.Tensor], mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: difference(weights[name].double(), mean[name].clone(), weights[name].dtype) for name in mean}


def ours(optimizer: ServerOptimizer, clients: list[Client], rounds: int = ROUNDS) -> Vector:
    """The weights after each round, (rounds, 5)."""
    weights, seen = {"w": torch.zeros(5, dtype=torch.float64)}, []
    for _ in range(rounds):
        start = optimizer.lookahead(weights).get("w", weights["w"]).numpy()
        mean = average([{"w": torch.from_numpy(client(start))} for client in clients], SIZES)
        weights = optimizer.step(weights, pseudo_gradient(weights, mean))
        seen.append(weights["w"].numpy())
    return np.stack(seen)


def transcribed(server: fedopt.Algorithm2 | fedopt.FedAvgM | fedopt.FlowerFedAdam, clients: list[Client]) -> Vector:
    x, seen = np.zeros(5), []
    for _ in range(ROUNDS):
        x = server.step(x, fedopt.Δ(x, [client(x) for client in clients], SIZES))
        seen.append(x)
    return np.stack(seen)


def near(a: Vector, b: Vector) -> bool:
    return bool(np.allclose(a, b, rtol=1e-10, atol=1e-13))


@pytest.mark.parametrize(("kind", "beta"), [("fedadagrad", 0.0), ("fedadam", 0.9), ("fedyogi", 0.9)])
def test_the_papers_momentum_is_the_default(kind: str, beta: float, clients: list[Client]) -> None:
    assert near(ours(server_optimizer(kind, 0.1), clients), transcribed(fedopt.Algorithm2(kind, 0.1, beta, 0.99, 1e-3), clients))


@pytest.mark.parametrize("decay", [0.0, 0.85, 0.5])
def test_fedacg_algorithm_1(decay: float, clients: list[Client]) -> None:
    want = np.stack(fedacg.algorithm_1(np.zeros(5), ROUNDS, clients, SIZES, decay))
    got = ours(server_optimizer("fedacg", momentum=decay), clients)
    assert near(got, want)
    if decay == 0:
        assert np.array_equal(got, ours(server_optimizer("fedavg"), clients))
        return
    assert not near(ours(server_optimizer("fedacg", momentum=0.9 * decay), clients), want)
    assert not near(ours(server_optimizer("fedavgm", momentum=decay), clients), want)  # control: momentum, but no look ahead
    assert np.array_equal(ours(server_optimizer("fedacg"), clients), got) == (decay == 0.85)  # the paper's is the default


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
        pseudo = pseudo_gradient(state, mean)
        got = {k: t.float() for k, t in optimizer.step(state, pseudo).items()}
        assert same(got, want)
        optimizer.step_within(state, mean, difference)  # the server's step, which takes the average
        assert same({k: t.float() for k, t in mean.items()}, want)
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
