"""Hold the values of a round: the instruction to a client, the state that it keeps, and its reply."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.blocks import sizes
from fl_bn.federation.payload import Sections
from fl_bn.methods import INPUTS, Phase

if TYPE_CHECKING:
    from fl_bn.exchange.session import Session
    from fl_bn.federation.intake import PartialAverage


@dataclass(frozen=True)
class Instruction:
    """Tell every client of a cohort what to do.

    Attributes:
        round: The round, from 1.
        phase: Its phase in the method's calendar. ``Phase.MEASURE``: clients only measure statistics.
        sections: Section -> name in the state_dict -> tensor. ``weights``, and ``statistics`` if they are
            shared. In training also the tensors that accompany the weights (control variates, momentum).
            ``start``, if it is there, has the initial values of what clients keep at home.
        learning_rate: The learning rate of this round.
        measured: What a statistics-only exchange measures, ``inputs`` or ``normalisers``.
        signature: The signature of model and method, see ``payload.signature``; empty: not checked.
        memory: Bytes of activations that a client may keep in an exchange that goes layer by layer.
        rate_share: ``learning_rate`` as a share of the schedule's. It is below 1 if statistics are frozen
            (``Method.learning_rate``).
    """

    round: int
    phase: Phase
    sections: Sections
    learning_rate: float = 0.1
    measured: str = INPUTS
    signature: str = ""
    memory: int = 0
    rate_share: float = 1.0

    @property
    def trains(self) -> bool:
        """Tell whether clients train; otherwise they only measure statistics."""
        return self.phase is not Phase.MEASURE


@dataclass(frozen=True)
class ClientState:
    """Hold the state that a client keeps between its rounds.

    Attributes:
        round: The round after which it was kept; 0 before the first.
        sections: Section -> name -> tensor. ``local`` are the layers that stay at home; ``momentum``,
            ``objective`` and ``optimizer`` are memories of training.
        counted: Whether the reply of that round changed the server's model.
    """

    round: int = 0
    sections: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    counted: bool = True

    def get(self, section: str) -> dict[str, Tensor]:
        """Return the tensors of ``section``, by name; none if it is missing."""
        return self.sections.get(section, {})


NOTHING = ClientState()


@dataclass(frozen=True)
class Reply:
    """Hold one client's reply after a round.

    Attributes:
        client: The client's number.
        sections: Section -> name -> tensor. ``weights`` or ``gradients``; ``statistics`` or ``moments``, as
            the method reports them; and the tensors that accompany the weights.
        samples: The number of different samples that the client trained on, or measured.
        weight: Its weight in averages, in samples; ``samples`` unless the phase says otherwise.
        metrics: Numbers by name. ``loss``: the mean over the training batches. ``steps``: local steps.
            ``batch``: samples of the first batch. ``measured``: samples of a statistics pass. ``waited``:
            seconds in exchanges. ``kept``: the round of the state that the client began with. ``drift``,
            ``drift-layer``, ``min-var`` and ``growth``: how far its own statistics moved, if the run shares
            that.
        round: The round of the instruction that it answers.
        signature: The signature of the client's model and method.
        largest: The largest size of a number in the sections; 0 if it was not measured.
        folded: Whether the server's average has its weights already; the reply then lacks them.
    """

    client: int
    sections: Sections
    samples: int
    weight: int
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0
    signature: str = ""
    largest: float = 0.0
    folded: bool = False

    @cached_property
    def statistics_sizes(self) -> dict[str, float]:
        """Return the largest size in each tensor of section ``statistics``, by name, see ``blocks.sizes``."""
        return sizes(self.sections.get("statistics", {}))

    @property
    def steps(self) -> int:
        """Return the number of local steps."""
        return int(self.metrics.get("steps", 0))

    @property
    def loss(self) -> float:
        """Return the mean training loss; NaN if it is missing."""
        return self.metrics.get("loss", math.nan)

    def local_drift(self, layers: Sequence[str]) -> Drift | None:
        """Return how far the client's own statistics moved; None if the reply does not say it.

        Args:
            layers: The names of the BatchNorm layers, in order.
        """
        m = self.metrics
        if "drift" not in m or not 0 <= (layer := int(m.get("drift-layer", -1))) < len(layers):
            return None
        return Drift(m["drift"], layers[layer], m.get("min-var", math.nan), m.get("growth", math.nan))


@dataclass(frozen=True)
class RoundReplies:
    """Hold the replies to one instruction, and the reasons why some are not used.

    Attributes:
        cohort: The clients that received the instruction, in order.
        parts: The usable replies, in client order.
        refused: Client -> the reason why its reply is not used.
        wrong: Clients whose reply no correct client would have sent.
        exchange: The session of the layer-wise exchange (FedTAN), if there was one.
        carrier: The carrier of that exchange.
        messages: The number of messages that each client received.
        partial: The part of the average that was computed while replies arrived.
    """

    cohort: Sequence[int]
    parts: Sequence[Reply]
    refused: Mapping[int, str] = field(default_factory=dict)
    wrong: Collection[int] = ()
    exchange: Session | None = None
    carrier: str = ""
    messages: int = 1
    partial: PartialAverage | None = None

    def only(self, parts: Sequence[Reply], refused: Mapping[int, str]) -> RoundReplies:
        """Return a copy in which just ``parts`` count.

        Args:
            parts: The replies that count.
            refused: Client -> the reason why its reply does not count.
        """
        return replace(self, parts=parts, refused=refused)
