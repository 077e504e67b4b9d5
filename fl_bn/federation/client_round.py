"""Carry out a client's round: ``client_round``, which every door and every engine calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fl_bn.federation.client import LocalRound
from fl_bn.federation.network import Copy
from fl_bn.federation.recording import Connect
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.methods import Method

Result = tuple[Reply, ClientState]


@dataclass(frozen=True)
class Outcome:
    """Hold what ``train`` says about a client's round.

    Attributes:
        samples: As in ``Reply``. 0: the client sat the round out.
        loss: The mean loss over the training batches; NaN without.
        metrics: Further numbers for the record, by name.
    """

    samples: int
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    client: int = 0


def client_round(
    model: nn.Module | Copy,
    method: Method,
    instruction: Instruction,
    state: ClientState,
    train: Callable[[LocalRound], Outcome],
    settings: LocalTraining | None = None,
    connect: Connect | None = None,
) -> Result:
    """Carry out a client's round: (network, method, instruction, state, train) -> (reply, state).

    ``train`` trains inside ``round.open()``, or measures. ``LocalRound`` has the
    other arguments.
    """
    round = LocalRound(model, method, instruction, state, settings, connect)
    return concluded(round, train(round))


def concluded(round: LocalRound, one: Outcome) -> Result:
    """Return the reply and the new state after outcome ``one``."""
    if round.trains and not one.samples:
        return round.sit_out(one.client, one.metrics)
    return round.reply(one.samples, one.loss, client=one.client, metrics=one.metrics)
