"""Record the facts of one round, for the log, the CSV, TensorBoard and the pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from fl_bn.federation.aggregation import Drift
from fl_bn.robust.view import FAR


@dataclass(frozen=True, slots=True)  # a run keeps those of all rounds
class ClientRecord:
    """Record one client's part in a round. Bytes are of arrays alone.

    Attributes:
        client: The client's index.
        samples: The samples that it trained on.
        steps: Its local steps.
        loss: Its mean training loss.
        bytes_down: Bytes that it received.
        bytes_up: Bytes that it sent.
        exchanges: Its layer-wise exchanges (FedTAN).
        waited: Its seconds in exchanges, its own sending included.
        distance: The distance (L2) of its update to the result of a robust rule.
        refused: The reason why its reply was not used; empty if it was.
    """

    client: int
    samples: int = 0
    steps: int = 0
    loss: float = float("nan")
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    waited: float = 0.0
    distance: float = float("nan")
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Record one kind of content that left one client in one message (in FedTAN's exchange: in one round).

    Attributes:
        client: The client's index.
        section: The section of the message.
        what: The content in words.
        tensors: How many arrays it has.
        nbytes: Their bytes.
        samples: How many different samples one statistic in it summarises; 0 without statistics.
        values: Activations per channel in the layer with the fewest; 0 if unknown.
    """

    client: int
    section: str
    what: str
    tensors: int
    nbytes: int
    samples: int = 0
    values: int = 0


@dataclass
class RoundRecord:
    """Record one training round.

    Attributes:
        round: The round.
        phase: Its phase.
        learning_rate: Its learning rate.
        clients: The records of its clients.
        drift: How far the shared statistics moved, if there are any.
        tensors_down: Tensors that a client received.
        tensors_up: Tensors that a client sent.
        bytes_down: Section -> bytes that a client received.
        bytes_up: Section -> bytes that a client sent.
        exchanges: Layer-wise exchanges.
        carrier: The carrier of these exchanges.
        aggregated: Whether the round changed the model.
        seconds: Its seconds of wall clock.
        evaluation: Metrics by name; empty without an evaluation.
        client_evaluation: Client -> metrics by name.
        disclosures: The contents that left the clients, also in statistics-only exchanges.
    """

    round: int
    phase: str
    learning_rate: float
    clients: list[ClientRecord] = field(default_factory=list)
    drift: Drift | None = None
    tensors_down: int = 0
    tensors_up: int = 0
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    exchanges: int = 0
    carrier: str = ""
    aggregated: bool = False
    seconds: float = 0.0
    evaluation: dict[str, float] = field(default_factory=dict)
    client_evaluation: dict[int, dict[str, float]] = field(default_factory=dict)
    disclosures: list[Disclosure] = field(default_factory=list)

    @property
    def accepted(self) -> list[ClientRecord]:
        """Return the records of the clients whose reply was used."""
        return [c for c in self.clients if not c.refused]

    def measure(self, distances: Sequence[float]) -> None:
        """Note the accepted clients' distances, in their order; without distances none is noted."""
        remaining = iter(distances)
        self.clients = [c if c.refused else replace(c, distance=next(remaining, math.nan)) for c in self.clients]

    @property
    def far(self) -> list[int]:
        """Return the clients whose update is farther from the robust one than ``FAR`` times the median distance."""
        known = [c for c in self.accepted if not math.isnan(c.distance)]
        limit = FAR * median([c.distance for c in known]) if known else 0.0
        return [c.client for c in known if c.distance > limit]

    @property
    def loss(self) -> float:
        """Return the mean training loss, weighted by samples."""
        total = sum(c.samples for c in self.accepted)
        return sum(c.samples * c.loss for c in self.accepted) / total if total else float("nan")


def batches_trained(records: Iterable[RoundRecord]) -> int:
    """Count a client's training batches in the rounds that changed the model.

    Returns:
        The sum over these rounds of the mean over the round's clients, rounded, at least 1 a round.
    """
    steps = [[client.steps for client in record.accepted] for record in records if record.aggregated and record.phase != "measure"]
    return sum(max(1, round(sum(own) / len(own))) for own in steps if own)
