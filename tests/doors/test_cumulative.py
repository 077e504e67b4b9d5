"""BatchNorm with momentum=None averages over all batches of a run, as FedAvg in plain PyTorch does, in every door."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_round, server_state
from fl_bn.methods import METHODS, Method, Role
from tests.doors.inner import LocalTraining, Samples, SecureAggregation, roles
from tests.in_process import run
from tests.listed import listed
from tests.loops.loops import DOORS, RATE

ROUNDS, SIZE = 3, 4
FEDAVG = methods.fedavg()
CLOSE = 1e-12
Tensors = dict[str, Tensor]


def net(momentum: float | None = None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 2)).double()


def clients() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=rng, dtype=torch.float64) + k, torch.randint(0, 2, (8,), generator=rng)) for k in range(2)]


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for part, label in zip(x.split(SIZE), y.split(SIZE), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(part), label).backward()
        optimizer.step()


def plainly(forgets: bool = False) -> list[Tensors]:
    """FedAvg in plain PyTorch: the mean of the clients' state_dicts. ``forgets``: a new network's count each round (control)."""
    shared, found = net().state_dict(), []
    for _ in range(ROUNDS):
        ends = []
        for x, y in clients():
            model = net().train()
            model.load_state_dict({**shared, "1.num_batches_tracked": torch.tensor(0)} if forgets else shared)
            train(model, x, y)
            ends.append(model.state_dict())
        shared = {name: ((ends[0][name] + ends[1][name]) / 2).to(t.dtype) for name, t in shared.items()}
        found.append(shared)
    return found


def apart(found: list[Tensors], want: list[Tensors]) -> float:
    names = [name for name in want[0] if name != "1.num_batches_tracked"]
    return max(float((a[n] - b[n]).abs().max()) for a, b in zip(found, want, strict=True) for n in names)


def loop(round: Any, x: Tensor, y: Tensor) -> None:
    train(round.model, x, y)


def federation(method: Method = FEDAVG, momentum: float | None = None) -> Federation:
    batches = [list(zip(x.split(SIZE), y.split(SIZE), strict=True)) for x, y in clients()]
    made = partial(torch.optim.SGD, lr=RATE)
    return Federation(net(momentum), method, batches, optimizer=made, workers=1)


def in_a_federation() -> list[Tensors]:
    made = federation()
    return [copy.deepcopy(made.server.shared.tensors()) for _ in made.run(ROUNDS)]


def door(name: str) -> list[Tensors]:
    if name in DOORS:
        return DOORS[name](net(), FEDAVG, clients(), loop, ROUNDS)
    return in_a_federation()


@pytest.mark.parametrize("name", [*DOORS, "federation"])
def test_the_average_goes_on_as_in_plain_pytorch(name: str) -> None:
    found = door(name)
    assert apart(found, plainly()) < CLOSE
    assert not apart(found, plainly(forgets=True)) < 1e-3
    assert [int(one["1.num_batches_tracked"]) for one in found] == [2, 4, 6]


def test_a_checkpoint_has_the_count(tmp_path: Any) -> None:
    whole, first, second = federation(), federation(), federation()
    list(whole.run(ROUNDS))
    for record in first.run(ROUNDS):
        if record.round == 1:
            first.checkpoint(tmp_path / "state")
            break
    second.resume(tmp_path / "state")
    list(second.run(ROUNDS))
    assert apart([second.model.state_dict()], [whole.model.state_dict()]) == 0
    assert int(second.model.state_dict()["1.num_batches_tracked"]) == 6


@listed("name", [name for name, make in METHODS.items() if make().personal])
def test_where_statistics_stay_at_home_the_count_does_too(name: str) -> None:
    method = METHODS[name]()
    assert roles(convert(net(), method))["1.num_batches_tracked"] is Role.BATCHES
    made = federation(method)
    list(made.run(ROUNDS))
    assert "1.num_batches_tracked" not in made.server.shared.tensors()
    assert [int(made.client_model(client).state_dict()["1.num_batches_tracked"]) for client in range(2)] == [6, 6]
    others = federation(method, momentum=0.1)
    list(others.run(1))
    assert "1.num_batches_tracked" not in others.server.shared.tensors()


def test_one_client_s_claim_does_not_freeze_the_average() -> None:
    state, model = server_state(net(), FEDAVG, ROUNDS, clients=3), convert(net(), FEDAVG)
    replies = []
    for client, claimed in enumerate((2, 2, 2**53)):
        with local_round(model, FEDAVG, state.instruction()) as round:
            train(round.model, *clients()[0])
        reply, _ = round.reply(8, client=client)
        assert reply.steps == 2
        replies.append(replace(reply, metrics={**reply.metrics, "steps": claimed}))
    state, _ = server_round(state, replies)
    assert int(state.shared.tensors()["1.num_batches_tracked"]) == 2


def test_a_secure_round_counts_as_one_in_the_clear() -> None:
    samples = [Samples(x.float(), y) for x, y in clients()] * 2
    options = {"settings": LocalTraining(steps=5, batch_size=SIZE), "model": net().float()}
    ends = [run(FEDAVG, samples, 2, secure=secure, **options).strategy.transport.shared.tensors() for secure in (None, SecureAggregation())]
    assert [int(end["1.num_batches_tracked"]) for end in ends] == [10, 10]
