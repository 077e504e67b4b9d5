"""Centred gradients, in every door and engine, whatever loop asks for them: SGD leaves the sum over the inputs of each output as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from fl_bn import methods
from fl_bn.methods import METHODS, Phase
from tests.doors.doors import DOORS, Rounds, through, wide
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
@pytest.mark.parametrize("door", [*DOORS, "one program"])
@pytest.mark.parametrize("name", CENTRING)
def test_the_sum_over_the_inputs_stays_in_every_door(name: str, door: str) -> None:
    method, net, names = CENTRING[name], rough_network("plain"), centred_weights(rough_network("plain"))
    options: dict[str, Any] = {"engine": "vectorised"} if door == "one program" else {}
    for centre in (True, False):
        chosen = method if centre else replace(method, centre=False)
        rounds = through("federation" if options else door, net, chosen, CLIENTS, rounds=3, **options)
        assert moved(rounds, names) < STILL if centre else moved(rounds, names) > MOVES
    assert len(names) > 1


def test_heads_small_and_derived_weights_are_left() -> None:
    tied, norms = nn.Linear(8, 8), [nn.BatchNorm1d(8), nn.BatchNorm1d(8)]
    derived = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    net = nn.Sequential(nn.Linear(7, 8), norms[0], tied, norms[1], tied, derived, nn.Linear(8, 2))
    assert centred_weights(net) == ["2.weight"]
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 3))
    assert centred_weights(convolutions) == ["1.weight", "2.weight"]


def test_the_sum_moves_until_the_freeze_and_stays_afterwards() -> None:
    net, names = rough_network("plain"), centred_weights(rough_network("plain"))
    states = through("federation", net, methods.fixbn(freeze_after=2), CLIENTS, rounds=4)
    assert moved(states[:2], names) > MOVES
    assert moved(states[2:], names) < STILL
