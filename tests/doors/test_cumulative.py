"""BatchNorm with momentum=None averages over all batches of a run, as FedAvg in plain PyTorch does, in every door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_bn import Federation, SeededBatches, convert, local_round, methods, server_round, server_state
from fl_bn.methods import METHODS, Role
from tests.doors.doors import DOORS, RATE, Rounds, apart, drawn, through, train
from tests.doors.inner import LocalTraining, Samples, SecureAggregation, roles
from tests.in_process import run
from tests.listed import listed

ROUNDS, SIZE, FEDAVG = 3, 4, methods.fedavg()


def net(momentum: float | None = None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 2)).double()


def clients() -> list[Samples]:
    rng = torch.Generator().manual_seed(1)
    return [Samples(torch.randn(8, 4, generator=rng, dtype=torch.float64) + k, torch.randint(0, 2, (8,), generator=rng)) for k in range(2)]


LOADERS = [SeededBatches(own.x, own.y, SIZE) for own in clients()]


def plainly(forgets: bool = False) -> Rounds:
    """FedAvg in plain PyTorch: the mean of the clients' state_dicts. ``forgets``: a new network's count each round (control)."""
    shared, found = net().state_dict(), Rounds()
    for number in range(1, ROUNDS + 1):
        ends = []
        for i, loader in enumerate(LOADERS):
            model = net().train()
            model.load_state_dict({**shared, "1.num_batches_tracked": torch.tensor(0)} if forgets else shared)
            optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
            for x, y in drawn(loader, i, number):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            ends.append(model.state_dict())
        shared = {name: ((ends[0][name] + ends[1][name]) / 2).to(t.dtype) for name, t in shared.items()}
        found.append(shared)
    return found


@pytest.mark.parametrize("door", DOORS)
def test_the_average_goes_on_as_in_plain_pytorch(door: str) -> None:
    found = through(door, net(), FEDAVG, clients(), ROUNDS)
    assert apart(found, plainly()) < 1e-12
    floats = [{name: t for name, t in one.items() if t.is_floating_point()} for one in found]
    forgotten = [{name: one[name] for name in floats[0]} for one in plainly(forgets=True)]
    assert not apart(floats, forgotten) < 1e-3  # control


@listed("name", [name for name, make in METHODS.items() if make().personal])
def test_where_statistics_stay_at_home_the_count_does_too(name: str) -> None:
    method = METHODS[name]()
    assert roles(convert(net(), method))["1.num_batches_tracked"] is Role.BATCHES
    for momentum in (None, 0.1):
        made = Federation(net(momentum), method, LOADERS)
        list(made.run(ROUNDS))
        assert "1.num_batches_tracked" not in made.server.shared.tensors()
        counted = [int(made.client_model(client).state_dict()["1.num_batches_tracked"]) for client in range(2)]
        assert momentum or counted == [6, 6]


def test_one_client_s_claim_does_not_freeze_the_average() -> None:
    state, replies = server_state(net(), FEDAVG, ROUNDS, clients=3), list[Any]()
    for client, claimed in enumerate((2, 2, 2**53)):
        with local_round(convert(net(), FEDAVG), FEDAVG, state.instruction()) as round:
            train(round, drawn(LOADERS[0], 0, 1))
        reply, _ = round.reply(8, client=client)
        replies.append(replace(reply, metrics={**reply.metrics, "steps": claimed}))
    state, _ = server_round(state, replies)
    assert int(state.shared.tensors()["1.num_batches_tracked"]) == 2


def test_a_secure_round_counts_as_one_in_the_clear() -> None:
    samples = [Samples(own.x.float(), own.y) for own in clients()] * 2
    options = {"settings": LocalTraining(steps=5, batch_size=SIZE), "model": net().float()}
    ends = [run(FEDAVG, samples, 2, secure=secure, **options).strategy.transport.shared.tensors() for secure in (None, SecureAggregation())]
    assert [int(end["1.num_batches_tracked"]) for end in ends] == [10, 10]
