"""How the server runs rounds, as a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.narrow import AS_THE_MODEL, PAYLOADS
from fl_bn.federation.settings import UPDATES
from fl_bn.support.client_names import ClientNames
from fl_bn.support.names import check_name

RECALIBRATIONS = ("auto", "passes", "exchange")
"""How exact statistics of all BatchNorm layers are measured.

``passes``: a message and a forward pass per layer. ``exchange``: one message, one forward pass and an exchange per layer, where all clients
can be there at once; else by passes. ``auto``: as ``exchange``, but by passes in a simulation, where they mostly cannot.
"""
MEMORY = 2**30
UNTIL_STILL = -1  # of ``calibrate``: as many as make the statistics of all layers exact
AS_METHOD = -2  # the same where the method wants it, else none


def constant_rate(round: int, rounds: int) -> float:
    return 0.1


def all_samples(samples: int) -> int:
    return samples


def unbounded(samples: int) -> int:
    return 0


@dataclass(frozen=True)
class Rounds:
    """How the server runs rounds.

    ``fraction`` of the clients train per round; ``min_replies`` of a cohort (fraction), and ``min_cohort`` clients, must be usable, or the
    round changes nothing and counts as failed; after ``max_failed`` failed rounds in a row the run stops. ``timeout`` (s) is the deadline
    of every message, ``wait`` (s) how long the server waits for ``clients`` before round 1, and for ``min_cohort`` of them before any
    other. Every ``evaluate_every`` rounds and after the last there is an evaluation, with ``at_clients`` on the clients' own test data.
    ``retry`` (s): how long a round waits for a client whose node or process died to come back, to be asked again (not in FedTAN's
    exchange). Every ``checkpoint_every`` rounds there is a checkpoint; 0: never.
    ``client_weights``: ``samples`` or ``uniform``. ``rate(round, rounds)``: the learning rate. ``exchange``: how
    FedTAN's layer-wise exchange is carried. ``calibrate``: statistics-only exchanges before round 1 (-1: one per BatchNorm layer, or until
    nothing moves; -2: so where the method wants it). ``recalibration``: how the statistics of all layers are made exact, see
    ``RECALIBRATIONS``; ``memory``: bytes of activations that a process may keep for it. ``unit_scale``: after them, where training
    normalises with shared statistics from its first batch on, weights are rescaled (``training.unit_scale``). ``max_steps``: local steps
    that the server asks for, so that nobody may claim more; 0: unknown. ``planned_steps``: the same of a client of so many samples.
    ``auxiliary``: what travels beside the weights (``training.auxiliary.auxiliary`` of the clients' settings).
    ``unseen``: after the last round clients are asked what they keep of BatchNorm, for the average that unseen clients get.
    ``at_start``: so many clients suffice for the run to start, 0: all; the others take part from the round before which they came.
    ``joining``: client by client the first round in which it may take part, where that is not 1.
    ``planned``: how many different samples a client of so many trains on in a round: its weight is then known before its reply.
    ``nodes``: Flower's node id of each client, by index, so that no other node is taken for it; empty: not known.
    ``names``: the name of each client's site, by index, for logs, errors and records; empty: a client is its number.
    ``payload``: the type in which weights and gradients travel, see ``federation.narrow``.
    """

    clients: int
    fraction: float = 1.0
    min_replies: float = 0.5
    max_failed: int = 3
    timeout: float = 600.0
    wait: float = 120.0
    evaluate_every: int = 1
    client_weights: str = "samples"
    update: str = "weights"
    seed: int = 0
    calibrate: int = AS_METHOD
    unit_scale: bool = True
    rate: Callable[[int, int], float] = constant_rate
    exchange: ExchangeSettings = ExchangeSettings()
    max_steps: int = 0
    planned_steps: Callable[[int], int] = unbounded
    min_cohort: int = 1
    at_clients: bool = False
    retry: float = 0.0
    checkpoint_every: int = 0
    auxiliary: tuple[Auxiliary, ...] = ()
    unseen: bool = False
    at_start: int = 0
    joining: Mapping[int, int] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    recalibration: str = "auto"
    memory: int = MEMORY
    planned: Callable[[int], int] = all_samples
    payload: str = AS_THE_MODEL

    @property
    def asks_for_steps(self) -> bool:
        """Tell whether the server knows how many local steps a client makes."""
        return self.max_steps > 0 or self.planned_steps is not unbounded

    def most_steps(self, samples: int) -> int:
        """Return how many local steps a client of so many ``samples`` may claim; 0: unknown."""
        return self.max_steps or self.planned_steps(samples)

    def __post_init__(self) -> None:
        if self.clients < 1 or self.evaluate_every < 1 or self.max_failed < 1:
            raise ValueError(f"clients, evaluate_every and max_failed must be at least 1, but got {self}")
        if not 0 < self.fraction <= 1 or not 0 <= self.min_replies <= 1:
            raise ValueError(f"fraction must be in (0, 1] and min_replies in [0, 1], but got {self.fraction} and {self.min_replies}")
        if not 1 <= self.min_cohort <= self.clients or self.checkpoint_every < 0:
            raise ValueError(
                f"min_cohort must be 1..{self.clients} and checkpoint_every >= 0, but got {self.min_cohort} and {self.checkpoint_every}"
            )
        if self.calibrate < AS_METHOD:
            raise ValueError(f"calibrate must be >= 0, -1 (all layers exact) or -2 (as the method wants), but got {self.calibrate}")
        if self.memory < 0:
            raise ValueError(f"memory must be >= 0 bytes, but got {self.memory}")
        if self.timeout <= 0 or self.wait < 0 or self.retry < 0:
            raise ValueError(f"timeout must be > 0 s, wait and retry >= 0 s, but got {self.timeout}, {self.wait} and {self.retry}")
        check_name("update", self.update, UPDATES)
        check_name("payload", self.payload, PAYLOADS)
        check_name("recalibration", self.recalibration, RECALIBRATIONS)
        check_name("client_weights", self.client_weights, ("samples", "uniform"))
        if strangers := sorted(client for client in self.joining if not 0 <= client < self.clients):
            raise ValueError(f"joining is for clients 0..{self.clients - 1}, but got {strangers}")
        if not 0 <= self.at_start <= (first := len(self.starting(1))) or first == 0:
            raise ValueError(
                f"of {self.clients} clients {first} may take part in round 1: at_start must be 0..{first}, but got {self.at_start}"
            )

        if self.nodes and not len(set(self.nodes)) == len(self.nodes) == self.clients:
            raise ValueError(f"nodes must name one node for each of {self.clients} clients, no node twice, but got {self.nodes}")
        if self.names and not len(set(self.names)) == len(self.names) == self.clients:
            raise ValueError(f"names must name a site for each of {self.clients} clients, no site twice, but got {self.names}")

    @property
    def called(self) -> ClientNames:
        """The names of the clients and of their nodes."""
        return ClientNames(self.names, self.nodes)

    def pace(self, learning_rate: float, rounds: int) -> float:
        """``learning_rate`` as a share of the first round's; 1 where it is larger (a warm-up)."""
        first = self.rate(1, rounds)
        return 1.0 if learning_rate >= first else learning_rate / first

    def starting(self, round: int) -> set[int]:
        """The clients that may take part in ``round``."""
        return {client for client in range(self.clients) if self.joining.get(client, 1) <= round}
