"""The values of a round: what goes to a client, what the client keeps, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.payload import Sections
from fl_bn.methods import INPUTS, Phase

if TYPE_CHECKING:
    from fl_bn.exchange.session import Session
    from fl_bn.federation.intake import PartialAverage


@dataclass(frozen=True)
class Instruction:
    """What the server asks of every client of a cohort.

    ``sections``: ``weights`` and, where they are shared, running ``statistics``, by state_dict name; in training also what accompanies
    the weights (control variates, momentum), and perhaps ``start``: what the client keeps at home, as a run starts with it, for a client
    that keeps nothing yet. ``learning_rate``: of this round; ``rate_share``: that as a share of what the schedule alone would have, below 1
    where the statistics are frozen (``Method.learning_rate``). ``measured``: of a statistics-only exchange (``Phase.MEASURE``), ``inputs``
    or ``normalisers``; ``memory``: bytes of activations that a client may keep in one that goes layer by layer. ``signature``: of model and
    method, see ``payload.signature``; empty: not checked.
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
        """Whether clients are to train; else they measure statistics alone."""
        return self.phase is not Phase.MEASURE


@dataclass(frozen=True)
class ClientState:
    """What a client keeps between its rounds: sections of tensors (``local``: layers that stay at home; ``momentum``, ``objective``,
    ``optimizer``), and the round after which they were kept; 0 and empty before its first.

    ``counted``: the reply of that round changed the server's model.
    """

    round: int = 0
    sections: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    counted: bool = True

    def get(self, section: str) -> dict[str, Tensor]:
        return self.sections.get(section, {})


NOTHING = ClientState()


@dataclass(frozen=True)
class Reply:
    """What one client sends after a round.

    ``sections``: ``weights`` or ``gradients``, ``statistics`` or ``moments`` as the method reports them, and what accompanies the weights.
    ``samples``: different ones that it trained on, or measured. ``weight``: of it in averages, its samples unless the phase says
    otherwise. ``metrics``: ``loss`` (mean over the training batches), ``steps``, ``batch`` (samples of the first batch), ``measured``
    (samples of a statistics pass), ``waited`` (seconds), ``kept`` (the round of the state that it went on from), and where it is asked how
    far its own statistics moved, ``drift``, ``drift-layer``, ``min-var``, ``growth``. ``round``: of the instruction that it answers;
    ``signature``: of the client's own model and method. ``largest``: size of a number in the sections, 0 where nobody measured it.
    ``folded``: its weights are in the server's average already, and gone.
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

    @property
    def steps(self) -> int:
        return int(self.metrics.get("steps", 0))

    @property
    def loss(self) -> float:
        return self.metrics.get("loss", math.nan)

    def local_drift(self, layers: Sequence[str]) -> Drift | None:
        """How far statistics that stay at home moved, where the client tells."""
        m = self.metrics
        if "drift" not in m or not 0 <= (layer := int(m.get("drift-layer", -1))) < len(layers):
            return None
        return Drift(m["drift"], layers[layer], m.get("min-var", math.nan), m.get("growth", math.nan))


@dataclass(frozen=True)
class RoundReplies:
    """All that became of one instruction: the usable replies, and why the others are not used.

    Attributes:
        cohort: The clients that were asked, in order.
        parts: The usable replies, in client order.
        refused: Why the reply of another client is not used, by client.
        wrong: Clients whose reply no correct client would have sent.
        exchange: The session of the layer-wise exchange (FedTAN), if there was one.
        carrier: What carried that exchange.
        messages: How many messages each client was sent.
        partial: The part of the average that was made as replies came in.
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
        """Return the same with ``parts`` as the replies that count, and why the others do not."""
        return replace(self, parts=parts, refused=refused)
