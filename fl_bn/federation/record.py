"""Records of one round: the facts that the log, the CSV, TensorBoard and the pictures all show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from fl_bn.federation.aggregation import Drift
from fl_bn.robust.view import FAR


@dataclass(frozen=True, slots=True)  # a run keeps those of all rounds
class ClientRecord:
    """One client's part in a round. ``refused``: why its reply was not used, empty if it was. Bytes are of arrays alone.

    ``exchanges``: layer-wise ones (FedTAN), and ``waited`` the seconds it spent in them, its own sending included.
    ``distance``: of its update to what a robust rule made of all (L2).
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
    """One kind of content that left one client in one message (in FedTAN's exchange: in one round).

    ``section`` has ``tensors`` arrays of ``nbytes`` in all. ``what`` says in words what they are. ``samples``: different ones that one
    statistic in it summarises, 0 if it holds none; ``values``: activations per channel in the layer with the fewest, 0 if unknown.
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
    """One training round.

    ``carrier``: of its layer-wise exchanges, if any. ``disclosures``: what left the clients, statistics-only exchanges
    included. ``evaluation``: metrics by name, empty where none was made; ``seconds`` of wall clock.
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
        return [c for c in self.clients if not c.refused]

    def measure(self, distances: Sequence[float]) -> None:
        """Note the accepted clients' distances, in their order; none is noted if there are none."""
        left = iter(distances)
        self.clients = [c if c.refused else replace(c, distance=next(left, math.nan)) for c in self.clients]

    @property
    def far(self) -> list[int]:
        """Clients whose update is farther from the robust one than ``FAR`` times the median distance."""
        known = [c for c in self.accepted if not math.isnan(c.distance)]
        limit = FAR * median([c.distance for c in known]) if known else 0.0
        return [c.client for c in known if c.distance > limit]

    @property
    def loss(self) -> float:
        """Mean training loss, weighted by samples."""
        total = sum(c.samples for c in self.accepted)
        return sum(c.samples * c.loss for c in self.accepted) / total if total else float("nan")


def batches_trained(records: Iterable[RoundRecord]) -> int:
    """Count the training batches that a client had in the rounds that changed the model.

    Returns:
        The sum over these rounds of the mean over the round's clients, rounded, at least 1 a round.
    """
    steps = [[client.steps for client in record.accepted] for record in records if record.aggregated and record.phase != "measure"]
    return sum(max(1, round(sum(own) / len(own))) for own in steps if own)
