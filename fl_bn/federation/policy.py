"""Describe a run: options (``RunSpec``), and the server's rounds (``ServerPolicy``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Real
from typing import Any, ClassVar

from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.settings import ALL_SAMPLES, LEARNING_RATE, LocalTraining
from fl_bn.methods import Method, Phase, Refresh, StatisticsReport
from fl_bn.methods.fbn import BOUNDED_SCALE
from fl_bn.methods.hbn import SCALE
from fl_bn.options import REQUIRED, Options, Used, declared, option, refuse
from fl_bn.support.client_names import ClientNames, nodes_of, sites_of

RECALIBRATIONS = ("auto", "passes", "exchange")
"""The ways to measure exact statistics of all BatchNorm layers."""
MEMORY = 2**30
"""The most bytes of activations in an exchange that goes layer by layer."""
UNTIL_STILL = -1  # value of ``calibrate``: as many exchanges as make the statistics of all layers exact
AS_METHOD = -2  # value of ``calibrate``: like UNTIL_STILL if the method needs it, otherwise none
MUCH = 0.05
"""The largest share of initial values in statistics when they freeze (``start_left``)."""
MOMENTUM = 0.1
"""The momentum of torch's BatchNorm layers by default."""


def constant_rate(round: int, rounds: int) -> float:
    """Return the default learning rate, 0.05 in all rounds."""
    return LEARNING_RATE


def checked_rate(what: str, rate: Callable[[int, int], float], round: int, rounds: int) -> float:
    """Return ``rate`` (argument ``what``) in ``round``, or raise ValueError unless it is >= 0."""
    value = rate(round, rounds)
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ValueError(f"{what} must return a finite number >= 0, but for round {round} of {rounds} returned {value!r}")
    return float(value)


def unbounded(samples: int) -> int:
    """Return 0: unknown, the default of ``ServerPolicy.planned_steps``."""
    return 0


def measures_in_the_clear(method: Method, config: Any) -> bool:
    """Tell whether a run measures exact statistics without secure sums and attackers."""
    if config["secure-aggregation"] or method.adversary is not None:
        return False
    if config["calibrate"] == UNTIL_STILL or (method.refresh is Refresh.EXACT and config["rounds"] > 0):
        return True
    by_itself = method.uses_shared(config["rounds"]) or start_left(method, config) > MUCH
    return config["calibrate"] == AS_METHOD and by_itself and not config["dp-noise"]


def start_left(method: Method, config: Any, momenta: Iterable[float] = (MOMENTUM,)) -> float:
    """Return the share of initial values (mean 0, variance 1) in statistics when they freeze.

    Every local step multiplies it by 1 - momentum. The largest counts. It is 0 if
    none freeze after round 1, clients send none, the local steps are unknown, or
    the network is trained.
    """
    rounds, steps = config["rounds"], config["local-steps"]
    if not steps or config["model-weights"] or method.reports(Phase.TRAIN) is not StatisticsReport.RUNNING:
        return 0.0
    before = sum(not method.freezes_statistics(method.phase(round, rounds)) for round in range(1, rounds + 1))
    return max(((1 - momentum) ** (before * steps) for momentum in momenta if 0 < before < rounds), default=0.0)


KEEPS_LAYERS = Used("a method with which clients keep BatchNorm tensors", lambda config: config.build_method().personal)
EVALUATE = Used(
    "clients that evaluate: models of their own, or on data of their own (dataset='sites')",
    lambda config: config.build_method().personal or config["dataset"] == "sites" or "kept" in config["buffers"],
)
MEASURES = Used(
    "runs whose clients make the statistics of all layers exact, in the clear and without attackers (hbn, fbn, static-bn, "
    "freeze-after=0, a freeze after few local steps, calibrate=-1)",
    lambda config: measures_in_the_clear(config.build_method(), config),
)
RESCALES = Used(
    "training that starts with calibrated statistics (hbn, fbn, freeze-after=0)",
    lambda config: config["rounds"] > 0 and config["calibrate"] != 0 and config.build_method().uses_shared(config["rounds"]),
)


@dataclass(frozen=True, kw_only=True)
class RunSpec(Options):
    """Hold the options that every run has: a ``Federation``, a Flower app, fl-bn's application.

    ``Federation`` and the strategies take them as keyword arguments of the same
    names.
    """

    name: ClassVar[str] = "the run"
    prefix: ClassVar[str] = ""

    fraction: float = option(1.0, "fraction of the clients that train in a round", "(0, 1]")
    evaluate_every: int = option(1, "rounds between evaluations; the last planned round is always evaluated", ">= 1", run=5)
    seed: int = option(0, "decides partition, initial weights, cohorts, batches and dropout", ">= 0")
    calibrate: int = option(
        AS_METHOD,
        "exchanges before round 1 in which clients measure BatchNorm's statistics and do not train; -1: as many as make all layers exact; "
        "-2: as -1 for hbn, fbn, freeze-after=0, and where statistics freeze after fewer than 29 local steps; else, and with dp-noise, 0",
        ">= -2",
    )
    unit_scale: bool = option(
        True,
        "hbn, fbn, freeze-after=0: after the calibration, the weights before BatchNorm are rescaled so that its inputs have deviation 1 "
        f"(hbn: {SCALE:g}; fbn: {BOUNDED_SCALE:g}, but 1 with fbn-momentum or clip='none')",
        hidden=True,
        used=RESCALES,
    )

    @property
    def common(self) -> dict[str, Any]:
        """Return ``RunSpec``'s own fields by name, for another kind of run."""
        return {one.name: getattr(self, one.name) for one in fields(RunSpec)}

    def due(self, round: int, rounds: int) -> bool:
        """Return whether the run evaluates after ``round`` (from 1) of ``rounds``."""
        return round == rounds or round % self.evaluate_every == 0


@dataclass(frozen=True)
class ServerPolicy(RunSpec):
    """Describe how the server runs rounds.

    Most fields are options, with their keys in docs/config.md; those of ``RunSpec``
    are given by name. Times are in seconds. Unlike in a run config, the default is
    to evaluate after every round, and not to wait for a client whose process died.

    Args:
        client_weights: A client's weight in averages: ``samples`` or ``uniform``.
        update: The tensors that clients send, see ``LocalTraining``.
        rate: ``rate(round, rounds)`` returns the learning rate, finite and >= 0.
            Default: 0.05.
        exchange: The settings of the layer-wise exchange.
        max_steps: The local steps that the server asks for, the most that a client
            may claim. 0: unknown.
        planned_steps: ``planned_steps(samples)`` returns the most local steps of a
            client with so many samples, for ``max_steps=0``. 0: unknown.
        at_clients: Whether the shared model is evaluated on the clients' own test
            data.
        evaluate_share: The share of the clients that evaluate in a round, 0..1.
        evaluate_least: The fewest clients that evaluate in a round.
        auxiliary: The kinds of tensors sent with the weights
            (``federation.auxiliary``).
        objective: As text (``Objective.described``), checked at the client. Empty:
            not checked.
        registered: Returns node -> name of the site that has this node now, see
            ``ClientNames``.
    """

    name: ClassVar[str] = "the round policy"
    prefix: ClassVar[str] = ""

    clients: int = option(
        REQUIRED,
        "clients in the population, in simulation equal to options.num-supernodes; 0: one per file or folder in data-path, where each is a "
        "client (see partition), else 10",
        "1..100000",
        unset=0,
    )
    _: KW_ONLY  # the order of the others may change
    min_replies: float = option(0.5, "fraction of a round's replies that must be usable, else the round changes nothing", "0..1")
    max_failed: int = option(3, "failed rounds in a row that stop the run", ">= 1", key="max-failed-rounds")
    timeout: float = option(600.0, "deadline and time to live of every message, seconds", "> 0", key="round-timeout")
    wait: float = option(
        120.0,
        "how long the server waits for all clients before round 1, and for min-cohort of them later, seconds",
        ">= 0",
        key="wait-timeout",
    )
    evaluate_clients: int = option(0, "largest number of clients that evaluate in a round; 0: all", ">= 0", used=EVALUATE)
    client_weights: str = declared(LocalTraining, "weigh_all", "samples", lambda weights: weights.replace(ALL_SAMPLES, "samples"))
    update: str = declared(LocalTraining, "update", "weights")
    rate: Callable[[int, int], float] = constant_rate
    exchange: ExchangeSettings = ExchangeSettings()
    max_steps: int = declared(LocalTraining, "steps", 0)
    planned_steps: Callable[[int], int] = unbounded
    min_cohort: int = option(
        1,
        "smallest number of connected clients with which a round starts, and of usable replies with which it changes the model",
        ">= 1",
    )
    at_clients: bool = False
    evaluate_share: float = 1.0
    evaluate_least: int = 0
    retry: float = option(
        0.0,
        "seconds that a round waits until a client whose node or process died comes back; 0: the round goes on without it",
        ">= 0",
        key="retry-timeout",
        run=120.0,
    )
    checkpoint_every: int = option(0, "rounds between checkpoints, for resume; 0: none; fl-bn run and submit set 5 unless given", ">= 0")
    auxiliary: tuple[Auxiliary, ...] = ()
    objective: str = ""
    unseen: bool = option(
        False,
        "after the last round, clients send the BatchNorm tensors that they keep; their average is saved for fl-bn adapt",
        key="unseen-client",
        used=KEEPS_LAYERS,
    )
    at_start: int = option(
        0,
        "number of connected clients with which the run starts (those that connect later take part from the next round); 0: all",
        ">= 0",
        key="clients-at-start",
    )
    min_sites: int = option(
        0,
        "number of sites with which the run starts, without those that are offline, refuse it, or cannot take part; 0: all sites",
        ">= 0",
        key="min-sites",
    )
    nodes: tuple[int, ...] = option(
        (),
        "Flower's node ids of clients 0, 1, ... (fl-bn submit fills this in); empty: the server believes the number that each node states",
        "NODE,NODE,...",
        key="client-nodes",
        run="",
        read=nodes_of,
    )
    names: tuple[str, ...] = option(
        (),
        "names of the sites of clients 0, 1, ... (fl-bn submit fills this in); empty: clients are named by their numbers",
        "NAME,NAME,...",
        key="client-names",
        run="",
        read=sites_of,
    )
    recalibration: str = option(
        "auto",
        "how statistics are made exact; passes: a message and a forward pass per layer; exchange: one of each in all, and an exchange per "
        "layer, if all clients can run at the same time, else as passes; auto: as exchange, but as passes in a simulation",
        RECALIBRATIONS,
        hidden=True,
        used=MEASURES,
    )
    registered: Callable[[], Mapping[int, str]] = dict

    def most_steps(self, samples: int) -> int:
        """Return the most local steps that a client with ``samples`` may claim; 0: unknown."""
        return self.max_steps or self.planned_steps(samples)

    def __post_init__(self) -> None:
        super().__post_init__()
        clients = self.clients
        refuse(
            (not clients, "clients must be in 1..100000, but got 0"),
            (self.min_cohort > clients, f"min_cohort must be 1..{clients}, the number of clients, but got {self.min_cohort}"),
            (not callable(self.rate),
             f"rate must be a function of (round, rounds) that returns the learning rate, but got {self.rate!r}"),
            (not isinstance(self.exchange, ExchangeSettings), f"exchange must be ExchangeSettings(...), but got {self.exchange!r}"),
            (self.client_weights not in ("samples", "uniform"),
             f"client_weights must be 'samples' or 'uniform', but got {self.client_weights!r}"),
            (self.at_start > clients, f"clients-at-start must be 0..{clients}, the number of clients, but got {self.at_start}"),
            (self.min_sites > clients, f"min_sites must be 0..{clients}, the number of clients, but got {self.min_sites}"),
            *((of and not len(set(of)) == len(of) == clients, f"{what} for each of clients={clients}, none twice, but got {of}")
              for what, of in (("nodes must name one node", self.nodes), ("names must name a site", self.names))),
        )  # fmt: skip

    @property
    def least_cohort(self) -> int:
        """Return the size of round 1's cohort, the smallest planned one."""
        return max(1, int(self.fraction * (self.at_start or self.clients) + 0.5))

    def needed(self, clients: int) -> int:
        """Return how many of ``clients`` must give usable replies."""
        return max(1, self.min_cohort, math.ceil(self.min_replies * clients - 1e-9))

    @property
    def called(self) -> ClientNames:
        """Return the names of the clients and of their nodes."""
        return ClientNames(self.names, self.nodes, self.registered)

    def scheduled(self, round: int, rounds: int) -> float:
        """Return the learning rate of ``round`` (from 1), or of the last round."""
        return checked_rate("rate", self.rate, min(round, max(rounds, 1)), rounds)

    def pace(self, learning_rate: float, rounds: int) -> float:
        """Return ``learning_rate`` over that of round 1, at most 1, even in a warm-up."""
        first = self.scheduled(1, rounds)
        return 1.0 if learning_rate >= first else learning_rate / first

    def evaluators(self, clients: int) -> int:
        """Return how many of ``clients`` with a model evaluate in a round."""
        wanted = max(self.evaluate_least, int(self.evaluate_share * clients + 0.5))
        return min(wanted, self.evaluate_clients or wanted)
