"""Centred gradients, in every door and engine, whatever loop asks for them: SGD leaves the sum over the inputs of each output as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_state
from fl_bn.methods import METHODS, Phase, freeze
from fl_bn.objectives import PLAIN, Objective, Scaffold
from tests.doors.doors import ALL, Rounds, through, wide
from tests.doors.inner import centred_weights
from tests.federation import random_samples
from tests.methods.centralised import rough_network

CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
CENTRING = {
    **{name: make() for name, make in METHODS.items() if make().centres(Phase.TRAIN)},
    "gn": replace(methods.gn(), centre=True),
    "fixbn, frozen": methods.fixbn(freeze_after=0),
}
STILL, MOVES = 1e-12, 1e-4


def sums(tensors: dict[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    return [tensors[name].double().flatten(1).sum(1) for name in names]


def moved(rounds: Rounds, names: Sequence[str]) -> float:
    """How far the sums move after the first round, which unit scale comes before."""
    first, last = sums(rounds[0], names), sums(rounds[-1], names)
    return max(float((a - b).abs().max()) for a, b in zip(first, last, strict=True))


@pytest.mark.sample("[fbn-", "[hbn-own", "[gn-flower", "n-fed")
@pytest.mark.parametrize("door", [*ALL, "one program"])
@pytest.mark.parametrize("name", CENTRING)
def test_the_sum_over_the_inputs_stays_in_every_door(name: str, door: str) -> None:
    method, net, names = CENTRING[name], rough_network("plain"), centred_weights(rough_network("plain"))
    options: dict[str, Any] = {"engine": "vectorised"} if door == "one program" else {}
    for centre in (True, False):
        chosen = method if centre else replace(method, centre=False)
        rounds = through("federation" if options else door, net, chosen, CLIENTS, rounds=3, **options)
        assert moved(rounds, names) < STILL if centre else moved(rounds, names) > MOVES
    assert len(names) > 1


def test_a_gradient_is_that_of_plain_torch_without_its_mean() -> None:
    """By ``backward`` in two parts, and by ``torch.autograd.grad``; a copy, and the network after the block, have plain ones."""
    method, net = methods.fbn(), rough_network("plain")
    model, (x, y) = convert(net, method), (CLIENTS[0].x, CLIENTS[0].y)
    with local_round(model, method, server_state(net, method, rounds=3, clients=3).instruction()):
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(x), y).backward()
        want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        for part, label in zip(x.split(4), y.split(4), strict=True):
            (F.cross_entropy(model(part), label) * len(part) / len(x)).backward()
        by_backward = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found = torch.autograd.grad(F.cross_entropy(model(x), y), [p for p in model.parameters() if p.requires_grad])
        by_grad = dict(zip(want, found, strict=True))
    for name in centred_weights(net):
        assert float(want[name].flatten(1).mean(1).abs().max()) > MOVES
        flat = want[name].flatten(1)
        want[name] = (flat - flat.mean(1, keepdim=True)).view_as(want[name])
    for found_by in (by_backward, by_grad):
        assert max(float((found_by[name] - want[name]).abs().max()) for name in want) < 1e-12
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(float(p.grad.flatten(1).mean(1).abs().max()) > MOVES for n, p in model.named_parameters() if n in centred_weights(net))


def test_a_layer_that_the_loop_lets_learn_is_centred_too() -> None:
    net = rough_network("plain")
    (layer, *_) = (weight.removesuffix(".weight") for weight in centred_weights(net))
    net.get_submodule(layer).requires_grad_(False)
    for centre in (True, False):
        method = replace(methods.fbn(), centre=centre)
        model = convert(net, method)
        with local_round(model, method, server_state(net, method, rounds=3).instruction()):
            optimizer = torch.optim.SGD(model.get_submodule(layer).parameters(), lr=0.1)
            model.get_submodule(layer).requires_grad_(True)
            F.cross_entropy(model(CLIENTS[0].x), CLIENTS[0].y).backward()
            optimizer.step()
        moves = (model.get_submodule(layer).weight - net.get_submodule(layer).weight).detach().flatten(1)
        assert moves.any()
        assert float(moves.sum(1).abs().max()) < STILL if centre else float(moves.sum(1).abs().max()) > MOVES


def test_heads_small_and_derived_weights_are_left() -> None:
    tied, norms = nn.Linear(8, 8), [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]
    derived = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    net = nn.Sequential(nn.Linear(7, 8), norms[0], tied, norms[1], tied, derived, nn.Linear(8, 2))
    assert centred_weights(net) == ["2.weight"]
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 3))
    assert centred_weights(convolutions) == ["1.weight", "2.weight"]


def test_gradients_are_centred_in_frozen_rounds_and_where_the_method_bounds_its_path() -> None:
    for name, make in METHODS.items():
        method = make() if make().layer or make().exchanges or make().name == "fixbn" else freeze(make(), 1)
        always = method.pools
        assert [method.centres(phase) for phase in (Phase.TRAIN, Phase.EXCHANGE, Phase.MEASURE)] == [always] * 3, name
        assert method.centres(Phase.FROZEN) == (always or method.freezes_statistics(Phase.FROZEN))
        assert not replace(method, centre=False).centres(Phase.FROZEN)
    assert not methods.fixbn(freeze_what="affine").centres(Phase.FROZEN)
    assert not any(method.centres(Phase.FROZEN) for method in (methods.fbn(momentum=0.1), methods.hbn(lam=0.1)))  # the papers' constants


def test_the_sum_moves_until_the_freeze_and_stays_afterwards() -> None:
    net, names = rough_network("plain"), centred_weights(rough_network("plain"))
    states = through("federation", net, methods.fixbn(freeze_after=2), CLIENTS, rounds=4)
    assert moved(states[:2], names) > MOVES
    assert moved(states[2:], names) < STILL


class Decaying(torch.optim.SGD):
    """SGD that also shrinks parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.999)


class Branching(nn.Module):
    """Its weight ``b`` has a part in every second batch of training, and ``q`` is quantised, as a frozen part may be."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b, self.fc = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.q = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn(self.a(x + 0.01 * F.linear(x, self.q.to(x.dtype)))))
        self.passes += self.training
        out: Tensor = self.fc(h + self.b(h) if self.passes % 2 else h)
        return out


@pytest.mark.parametrize("objective", [PLAIN, Scaffold()], ids=lambda objective: objective.name)
def test_a_weight_that_a_batch_does_not_reach_may_move(objective: Objective) -> None:
    batches = [(torch.randn(8, 16), torch.randint(0, 3, (8,))) for _ in range(4)]
    made: Any = torch.optim.SGD if objective is not PLAIN else Decaying
    federation = Federation(Branching(), methods.fbn(), [batches] * 2, optimizer=partial(made, lr=0.05), objective=objective, workers=1)
    assert [record.aggregated for record in federation.run(2)] == [True, True]
