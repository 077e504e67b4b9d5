"""Loops that others write: passes that lead to no step, layers that run later, changes of the network, threads, wrapped optimisers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import update_bn

from fl_bn import convert, local_round, methods, server_round, server_state
from fl_bn.methods import Method
from tests.loops.loops import Moments, clients, net, opened, plain


def usual(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return x


class Pair(nn.Module):
    """A generator and a discriminator, each with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def test_a_layer_that_does_not_run_in_the_first_step_reports_its_own_first_batch() -> None:
    method, pair = methods.fbn(), Pair()
    state = server_state(pair, method, rounds=2)
    model = convert(pair, method)
    noise = torch.randn(3, 16, 4)
    with local_round(model, method, state.instruction()) as round:
        ends = SGD(model.critic.parameters(), 0.1), SGD(model.generator.parameters(), 0.1)
        with torch.no_grad():
            seen = Moments.of(model.generator[0](noise[0]))
        for step in noise:
            with torch.no_grad():
                fake = model.generator(step)
            ends[0].zero_grad()
            (F.softplus(model.critic(fake)).mean() + F.softplus(-model.critic(torch.ones(16, 4) + step)).mean()).backward()
            ends[0].step()
            ends[1].zero_grad()
            F.softplus(-model.critic(model.generator(step))).mean().backward()
            ends[1].step()
    reply, _ = round.reply(48, loss=1.0)
    moments = reply.sections["moments"]
    assert moments["critic.1.count"] == 32
    assert moments["generator.1.count"] == 16
    torch.testing.assert_close(moments["generator.1.mean"].double(), seen.mean.double(), rtol=1e-5, atol=1e-6)
    state, record = server_round(state, [reply])
    assert record.aggregated
    assert state.model.generator[1].running_mean.any()


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(), methods.hbn(), methods.fixbn(freeze_after=0)], ids=lambda m: m.name)
def test_a_copy_gets_the_statistics_of_new_data(method: Method) -> None:
    data = clients()
    model = convert(net(), method)
    with opened(method, model) as round:
        if method.name == "hbn":
            round.measure(data[:1])
        plain(round, *data[0])
        inside = copy.deepcopy(model)
    for copied in (inside, copy.deepcopy(model)):
        update_bn([x for x, _ in data], copied)
        truth = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2)).double()
        truth[0].load_state_dict(copied[0].state_dict())
        for x, _ in data:
            truth[:2](x)
        torch.testing.assert_close(copied[1].running_mean, truth[1].running_mean)
        torch.testing.assert_close(copied[1].running_var, truth[1].running_var)
    again = server_state(net(), method, rounds=2).instruction()
    with local_round(copied, method, again) as round:  # a round ends that
        if method.name != "fedavg":
            assert round.model[1].forward(data[0][0] @ torch.ones(4, 8).double()).shape == (len(data[0][0]), 8)
            assert not vars(round.model[1]).get("refills")


def test_clients_may_train_in_threads() -> None:
    method, (x, y) = methods.fbn(), clients()[0]
    asked = server_state(net(), method, rounds=2).instruction()

    def client(_: int) -> int:
        model = convert(net(), method)
        with local_round(model, method, asked) as round:
            optimizer = SGD(model.parameters(), 0.01)
            for _ in range(3):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return round.steps

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(client, range(100))) == {3}
    finally:
        sys.setswitchinterval(before)


class Around(Optimizer):
    """An optimiser that wraps another and calls its ``step``, as implementations of SAM and Lookahead do."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = SGD(self.param_groups, lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step()


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(report="all")], ids=lambda method: method.name)
def test_an_optimizer_around_another_makes_one_step(method: Method) -> None:
    model = convert(net(), method)
    with opened(method, model) as round:
        optimizer = Around(model.parameters(), 0.1)
        for x, y in clients():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert round.steps == len(clients())
    round.reply(100)


def test_a_network_is_in_one_round_at_a_time() -> None:
    method = methods.fbn()
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with local_round(model, method, asked) as round:
        with pytest.raises(ValueError, match="round"), local_round(model, method, asked):
            raise AssertionError
        plain(round, *clients()[0])
    with local_round(model, method, asked) as round:
        plain(round, *clients()[0])
    assert round.reply(16)[0].sections["moments"]["1.count"] == 16
