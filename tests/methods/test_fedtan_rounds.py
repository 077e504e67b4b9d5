"""Whole rounds of FedTAN: one exact step, then local ones by one optimiser; the paper's algorithms; dropout over every carrier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import SCHEDULES
from tests.federation import largest_deviation, union
from tests.in_process import FULL_BATCH, run
from tests.methods.centralised import RATE, batch_of, make_sgd, rough, rough_network
from tests.methods.cohort import CARRIERS, Cohort, step
from tests.networks import seeded_network
from tests.oracles import fedtan as oracle
from tests.oracles.fedtan_autograd import backward_together

SIZES, STEPS, EXACT, WRONG = (9, 21, 15), 3, 1e-10, 1e-3
FEDTAN, ALG2 = METHODS["fedtan"], METHODS["fedavg-alg2"]
Clients = Callable[..., list[Samples]]
Batches = list[list[np.ndarray]]


def split(clients: Sequence[Samples], steps: int = STEPS) -> Batches:
    return [np.array_split(np.arange(len(client)), steps) for client in clients]


def three_steps(model: nn.Module, clients: Sequence[Samples], shared: Sequence[int] = (0,), fresh: bool = False) -> list[nn.Module]:
    """Every client's model: the steps in ``shared`` all together, the others each client with nn.BatchNorm on its own batch."""
    models = [copy.deepcopy(model).train() for _ in clients]
    optimizers = [make_sgd(own) for own in models]
    for number in range(STEPS):
        batches = [batch_of(client, own[number]) for client, own in zip(clients, split(clients), strict=True)]
        if fresh and number == 1:
            optimizers = [make_sgd(own) for own in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if number in shared:
            backward_together(models, batches)
        else:
            for own, (x, y) in zip(models, batches, strict=True):
                F.cross_entropy(own(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return models


def off(cohort: Cohort, want: Sequence[nn.Module]) -> float:
    states = [{key: tensor for key, tensor in own.state_dict().items() if tensor.is_floating_point()} for own in want]
    return max(largest_deviation(ours.state_dict(), state) for ours, state in zip(cohort.models, states, strict=True))


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_later_steps_are_local_and_the_optimiser_is_one(schedule: str, carrier: str, tiny_clients: Clients) -> None:
    clients, model = tiny_clients(SIZES), rough_network("plain")
    settings = LocalTraining(7, steps=STEPS, momentum=0.9, weight_decay=0.01)
    cohort = step(model, FEDTAN(schedule), clients, carrier, settings=settings, batches=split(clients))
    assert off(cohort, three_steps(model, clients)) < EXACT
    assert cohort.session.exchanges == 2 * {"merged": 2, "paper": 3}[schedule]  # those of the first step alone
    assert not off(cohort, three_steps(model, clients, fresh=True)) < WRONG
    assert not off(cohort, three_steps(model, clients, shared=range(STEPS))) < WRONG
    assert not off(cohort, three_steps(model, clients, shared=())) < WRONG
    assert not off(cohort, three_steps(model, clients, shared=(1,))) < WRONG


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
        nn.Flatten(), nn.Linear(320, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4),
    )  # fmt: skip


def net_of(model: nn.Sequential) -> oracle.Net:
    tensors = [t.numpy().copy() for t in model.state_dict().values() if t.is_floating_point()]
    return oracle.Net([oracle.Layer(*tensors[i : i + 5]) for i in range(0, len(tensors) - 2, 5)], *tensors[-2:])


def apart(got: Sequence[Tensor], want: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a.detach().numpy() - b).max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_algorithms_1_to_3_as_printed(schedule: str, steps: int, tiny_clients: Clients) -> None:
    clients, model = tiny_clients((6, 14, 10)), rough(chain)
    index, settings = split(clients, steps), LocalTraining(7, steps=steps)
    data = [[batch_of(client, i) for i in own] for client, own in zip(clients, index, strict=True)]
    arrays = [[(x.numpy(), y.numpy()) for x, y in own] for own in data]
    for method, ours, other in (
        (FEDTAN(schedule), oracle.algorithm_1, oracle.fedavg_alg2),
        (ALG2(schedule), oracle.fedavg_alg2, oracle.algorithm_1),
    ):
        cohort = step(model, method, clients, settings=settings, batches=index)
        states = [[t for t in own.state_dict().values() if t.is_floating_point()] for own in cohort.models]
        mean = [t for name, t in cohort.mean([len(own[0]) for own in index]).items() if "num_batches" not in name]
        nets, server = ours(net_of(model), arrays, RATE)
        assert max(apart(state, net.tensors()) for state, net in zip(states, nets, strict=True)) < EXACT
        assert apart(mean, server) < EXACT
        nets, server = other(net_of(model), arrays, RATE)
        assert not min(apart(state, net.tensors()) for state, net in zip(states, nets, strict=True)) < WRONG
        assert not apart(mean, server) < WRONG


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", ["resnet", "cnn"])  # dropout in the head, and between two BatchNorm layers
def test_with_dropout_all_carriers_end_at_the_same_bits(network: str, dtype: torch.dtype, tiny_clients: Clients) -> None:
    clients, settings, model = tiny_clients(SIZES), LocalTraining(7, steps=2, momentum=0.9), seeded_network(network, dtype=dtype)

    def end(carrier: str, seed: int) -> list[Tensor]:
        cohort = step(model, FEDTAN("paper"), clients, carrier, settings=settings, batches=split(clients, 2), seed=seed)
        return [tensor for own in cohort.models for tensor in own.state_dict().values()]

    ends = {carrier: end(carrier, 5) for carrier in CARRIERS}
    for carrier in CARRIERS:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(ends[carrier], ends["local"], strict=True)), carrier
    assert not any(torch.equal(ours, theirs) for ours, theirs in zip(end("local", 6)[-2:], ends["local"][-2:], strict=True))  # control


@pytest.mark.parametrize(("schedule", "carrier"), [("merged", "local"), ("paper", "local"), ("merged", "replay")])
def test_rounds_over_flower_are_steps_of_centralised_training(schedule: str, carrier: str, tiny_clients: Clients) -> None:
    """Not over gRPC, which needs clients in processes of their own."""
    clients, model, rounds = tiny_clients((3, 7, 5)), rough_network("resnet"), 3
    reference = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    x, y = batch_of(union(clients))
    policy = {"exchange": ExchangeSettings(carrier)}
    runs = {
        method.name: run(method, clients, rounds, model=model, settings=FULL_BATCH, policy=policy)
        for method in (FEDTAN(schedule), ALG2(schedule), METHODS["fedavg"]())
    }
    for number in range(1, rounds + 1):
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        want = {key: tensor for key, tensor in reference.state_dict().items() if tensor.is_floating_point()}
        off = {
            name: largest_deviation({key: torch.from_numpy(array) for key, array in ran.trajectory[number].items()}, want)
            for name, ran in runs.items()
        }
        assert off["fedtan"] < EXACT, off
        assert not off["fedavg-alg2"] < WRONG
        assert not off["fedavg"] < WRONG
