"""Objectives, maintained momentum and server optimizers in Flower runs with half of the clients, against the papers' algorithm boxes.

A client's batches are all of its samples, so that the order in which it draws them changes nothing but the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.local import Samples
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Moon, Objective, Scaffold
from tests.in_process import Run, run
from tests.networks import seeded_network
from tests.oracles import fedopt, fedprox, fedsam, maintained_momentum, moon, scaffold
from tests.oracles.fedavg import Client, fedavg

SIZES, ROUNDS, RATE, STEPS, NEAR = [6, 14, 10, 4], 5, 0.1, 2, 1e-10
Named = Mapping[str, Tensor]


@pytest.fixture
def clients(tiny_clients: Callable[..., list[Samples]]) -> list[Samples]:
    return tiny_clients(tuple(SIZES))


def net() -> nn.Module:
    return seeded_network("plain", dtype=torch.float64)


def tensors(clients: list[Samples]) -> list[Client]:
    like = torch.zeros((), dtype=torch.float64)
    return [[c.batch(np.arange(len(c)), like)] * STEPS for c in clients]


def ran(clients: list[Samples], objective: Objective = PLAIN, server: str = "fedavg", fraction: float = 0.5, **settings: object) -> Run:
    training = LocalTraining(64, steps=STEPS, objective=objective, **settings)  # type: ignore[arg-type]
    policy = {"fraction": fraction, "auxiliary": auxiliary(training), "rate": lambda *_: RATE}
    optimizer = server_optimizer(server, 1.0 if server in ("fedavg", "fedavgm", "fedacg") else 0.05)
    return run(METHODS["fedavg"](), clients, ROUNDS, settings=training, model=net(), policy=policy, optimizer=optimizer)


def cohorts(of: Run) -> list[list[int]]:
    found = [[c.client for c in record.accepted] for record in of.records]
    assert all(len(cohort) == 2 for cohort in found)
    assert len({tuple(cohort) for cohort in found}) > 2
    return found


def off(of: Run, want: nn.Module) -> float:
    arrays = of.trajectory[ROUNDS]
    state = {name: t.numpy() for name, t in want.state_dict().items() if t.is_floating_point()}
    return max(float(np.abs(arrays[name] - state[name]).max()) for name in state)


OBJECTIVES: dict[str, tuple[Objective, Callable[[list[list[int]], list[Client]], nn.Module]]] = {
    "none": (PLAIN, lambda S, data: fedprox.algorithm_2(net(), S, data, SIZES, RATE, 0.0)),
    "fedprox": (FedProx(0.7), lambda S, data: fedprox.algorithm_2(net(), S, data, SIZES, RATE, 0.7)),
    "scaffold-1": (Scaffold(1), lambda S, data: scaffold.algorithm_1(net(), S, data, SIZES, RATE, 1, [d[:1] for d in data]).x),
    "scaffold-2": (Scaffold(2), lambda S, data: scaffold.algorithm_1(net(), S, data, SIZES, RATE, 2).x),
    "moon": (Moon(2.0), lambda S, data: moon.algorithm_1(net(), S, data, SIZES, RATE, 2.0, 0.5, "9")[0]),
    "fedsam": (FedSAM(0.3), lambda S, data: fedsam.algorithm_1(net(), S, data, SIZES, RATE, 0.3)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective(name: str, clients: list[Samples]) -> None:
    objective, oracle = OBJECTIVES[name]
    got, data = ran(clients, objective), tensors(clients)
    schedule = cohorts(got)
    assert off(got, oracle(schedule, data)) < NEAR
    for other, (_, wrong) in OBJECTIVES.items():
        assert other == name or not off(got, wrong(schedule, data)) < NEAR, other
    assert not off(got, oracle(schedule[1:] + schedule[:1], data)) < NEAR  # control: other clients


def test_scaffolds_variates_travel(clients: list[Samples]) -> None:
    got, data = ran(clients, Scaffold(2)), tensors(clients)
    schedule = cohorts(got)
    names = [name for name, _ in net().named_parameters()]
    for number in range(1, ROUNDS + 1):
        want = scaffold.algorithm_1(net(), schedule[: number - 1], data, SIZES, RATE, 2).c
        for message in got.grid.train(number):
            assert set(message["control"]) == set(names)
            for name, c in zip(names, want, strict=True):
                np.testing.assert_allclose(message["control"][name], c, atol=NEAR)
    assert "control" not in ran(clients).grid.train(1)[0]


@pytest.mark.parametrize("maintain", ["reset", "local", "global"])
def test_maintained_momentum(maintain: str, clients: list[Samples]) -> None:
    got, data = ran(clients, momentum=0.8, maintain=maintain), tensors(clients)
    schedule = cohorts(got)
    for other in ("reset", "local", "global"):
        want = maintained_momentum.fedavg(net(), schedule, data, SIZES, RATE, 0.8, other)
        assert (off(got, want) < NEAR) == (other == maintain), other


@pytest.mark.parametrize("kind", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_a_server_optimizer_steps_weights_and_no_statistic(kind: str, clients: list[Samples]) -> None:
    """Every round's average from the transcription of FedAvg, its weights through the transcription of the optimizer."""
    got, data = ran(clients, server=kind, fraction=1.0), tensors(clients)
    beta = {"fedadagrad": 0.0}.get(kind, 0.9)
    servers = {name: server(kind, beta) for name, _ in net().named_parameters()}
    everything = {name: server(kind, beta) for name in net().state_dict()}  # control: statistics through the optimizer, too
    for steps in (servers, everything):
        model = net()
        for _ in range(ROUNDS):
            before = {name: t.numpy().copy() for name, t in model.state_dict().items()}
            fedavg(model, 1, data, SIZES, RATE)
            after = {name: t.numpy().copy() for name, t in model.state_dict().items()}
            stepped = {name: steps[name].step(before[name], after[name] - before[name]) if name in steps else after[name] for name in after}
            model.load_state_dict({name: torch.from_numpy(np.asarray(array)) for name, array in stepped.items()})
        assert (off(got, model) < NEAR) == (steps is servers)


def server(kind: str, beta: float) -> fedopt.Algorithm2 | fedopt.FedAvgM:
    return fedopt.FedAvgM(1.0, beta) if kind == "fedavgm" else fedopt.Algorithm2(kind, 0.05, beta, 0.99, 1e-3)


def test_fedacg_starts_clients_ahead(clients: list[Samples]) -> None:
    got, data = ran(clients, server="fedacg", fraction=1.0), tensors(clients)
    for decay in (0.85, 0.0):
        model = net()
        moved = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for _ in range(ROUNDS):
            θ = {name: p.detach().clone() for name, p in model.named_parameters()}
            model.load_state_dict({name: θ[name] + decay * moved[name] for name in θ}, strict=False)  # statistics: as they are
            fedavg(model, 1, data, SIZES, RATE)
            moved = {name: p.detach() - θ[name] for name, p in model.named_parameters()}
        assert (off(got, model) < NEAR) == (decay > 0)
