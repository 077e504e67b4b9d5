"""Define a method: its BatchNorm layer, local tensors, the clients' reports, and how they are combined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.moments import Average, Moments, Running, plain_average, pool, weighted_mean
from fl_bn.bn.roles import DOWN_ONLY, Role
from fl_bn.options import option
from fl_bn.robust.attacks import Adversary, Attack


class Phase(Enum):
    """Name the purpose of one message to the cohort.

    Attributes:
        TRAIN: local training.
        FROZEN: local training in which some BatchNorm tensors are frozen (``Method.frozen``). Frozen
            statistics are not reported.
        MEASURE: statistics only, without training.
        EXCHANGE: local training. In its first local step the clients average every layer's moments (FedTAN).
    """

    TRAIN = "train"
    FROZEN = "frozen"
    MEASURE = "measure"
    EXCHANGE = "exchange"


class StatisticsReport(Enum):
    """Name the kind of statistics that a client reports.

    Attributes:
        RUNNING: running statistics after training.
        BATCHES: moments of the training batches.
        FIRST: moments of the first training batch.
        PASS: moments of the layers' inputs, measured in a pass over the data before training.
        MOVING: moving averages over the training batches.
    """

    NOTHING = "nothing"
    RUNNING = "running statistics after training"
    BATCHES = "moments of the training batches"
    FIRST = "moments of the first training batch"
    PASS = "moments of a pass before training"
    MOVING = "moving averages over the training batches"


class Place(Enum):
    """Name the place where a tensor lives.

    Attributes:
        SHARED: sent both ways, trained at clients, averaged.
        STATISTIC: running statistics that are sent down. The server combines the clients' reports.
        HOME: never leaves its client, which stores it between its rounds.
        DOWN_ONLY: the server's. Clients receive it, and never send it.
        COUNTER: never sent, never averaged, since the average need not be an integer.
    """

    SHARED = "shared"
    STATISTIC = "shared, combined by the server"
    HOME = "stays at its client"
    DOWN_ONLY = "the server's, sent to the clients, never averaged"
    COUNTER = "never sent, never averaged"


OBSERVED = (StatisticsReport.BATCHES, StatisticsReport.FIRST, StatisticsReport.MOVING)
"""Reports on training batches, whose moments the layers record."""
MOMENTS = (*OBSERVED, StatisticsReport.PASS)


class Refresh(Enum):
    """Name the way of updating the shared statistics for the present weights, before an evaluation.

    Attributes:
        NOTHING: no update. The model is evaluated with the statistics of training.
        EXACT: passes in evaluation mode, until all layers have the statistics of the union of all data. After
            pass p, layers 1..p have them. One pass is enough if clients exchange statistics layer by layer
            (``RECALIBRATIONS``).
        HYBRID: one pass in training mode. It measures the mean and variance that every layer normalises with.
        REPORTED: no pass. The reports of the round's clients are combined.
    """

    NOTHING = "nothing"
    EXACT = "exact"
    HYBRID = "hybrid"
    REPORTED = "reported"


INPUTS, NORMALISERS = MEASURED = ("inputs", "normalisers")
EVERYONE, COHORT = "all", "cohort"
"""The clients whose statistics are evaluated: all, or those that trained in the round."""


AS_TRAINED = -1
"""Size of a statistics pass: as many samples as the client trains on in the round."""
FEWEST = 64
"""The fewest samples of a pass of size ``AS_TRAINED``, if the client has so many: that of HBN's code."""


@dataclass(frozen=True)
class StatisticsPass:
    """Describe a pass over a client's data that measures every BatchNorm layer and changes no state.

    Attributes:
        lower_layers: the statistics with which the layers below the measured one normalise. ``shared``: as in
            evaluation; combining the clients' moments is then exact in every layer. ``hybrid``: as in
            training; it is then exact in the first layer only.
        samples: the size of a seeded random subset. 0: all samples. ``AS_TRAINED``: as many as the client
            trains on in the round, but at least ``FEWEST`` (``size``).
        measured: ``inputs``: the moments of the layers' inputs. ``normalisers``: the mean and variance with
            which a training batch is normalised (``Refresh.HYBRID``).
    """

    lower_layers: str
    samples: int = 0
    measured: str = "inputs"

    def size(self, samples: int, trained: int) -> int:
        """Return the pass's size at a client with ``samples`` that trains on ``trained`` of them."""
        wanted = max(FEWEST, trained) if self.samples == AS_TRAINED else self.samples or samples
        return min(wanted, samples)

    @classmethod
    def for_exchange(cls, measured: str, samples: int = 0) -> StatisticsPass:
        """Return the pass of a statistics-only exchange.

        ``inputs`` are measured over all data as in evaluation, ``normalisers`` as in training, on a random
        subset of size ``samples`` (0 or ``AS_TRAINED``: all).
        """
        return cls("hybrid", max(samples, 0), measured) if measured == NORMALISERS else cls("shared", 0, measured)


@dataclass(frozen=True)
class LayerReports:
    """Hold the clients' reports on one layer, and what else the server's rule needs to combine them.

    Attributes:
        parts: one ``Moments`` per client, in the order of the clients.
        steps: the number of training batches per client: a mean over the clients, weighted by the counts of
            ``parts``.
        average: the rule that combines n clients' values.
        pace: the round's learning rate divided by that of the first round.
        scale: the standard deviation of the layer's input at the start of the run, if the server set it
            (``federation.unit_scale``).
    """

    shared: Running
    parts: Sequence[Moments]
    momentum: float
    steps: float
    average: Average = weighted_mean
    pace: float = 1.0
    scale: float = 1.0


def replace_by_pooled(reports: LayerReports) -> Running:
    """Replace a layer's shared statistics by the pooled reports, which cover all clients' data."""
    return _unbiased(pool(reports.parts, reports.average))


def replace_by_averaged(reports: LayerReports) -> Running:
    """Replace a layer's shared statistics by the reports' average (HBN's second ablation)."""
    return _unbiased(plain_average(reports.parts, reports.average))


def _unbiased(moments: Moments) -> Running:
    return Running(moments.mean, moments.bessel())


def keep(reports: LayerReports) -> Running:
    """Return the shared statistics unchanged, for methods that combine no reports."""
    return reports.shared


def always_train(round: int, rounds: int) -> Phase:
    """Return the phase TRAIN for every round."""
    return Phase.TRAIN


@dataclass(frozen=True)
class Method:
    """Define one way of doing batch normalisation in federated learning.

    Attributes:
        name: the name in the run config and in reports.
        layer: makes the replacement of a BatchNorm layer. None: torch's own layer stays.
        prepare: changes the rest of the converted network. The log shows the first line of its docstring.
        local: roles of tensors that never leave their client. The client stores them between its rounds.
        local_in: ``(layer, index) -> roles``: the roles that never leave their client, beside ``local``, in
            the BatchNorm layer with this name and place in the network (``named_modules``), counted from 0.
            If its statistics are among them, ``layer`` does not replace this layer. None: no layer differs
            from the others.
        report: the statistics that clients report after training.
        combine: computes a layer's new shared statistics from the clients' reports.
        phase: ``(round, rounds) -> Phase``. Rounds count from 1.
        refresh: the statistics-only exchange before an evaluation, if the shared statistics were measured
            with older weights (HBN).
        refreshed_by: the clients in that exchange: ``all``, or the round's ``cohort``.
        renew: computes a layer's shared statistics from the reports of that exchange.
        calibrate: whether the shared statistics are measured before round 1, because training uses them.
        constant: whether training normalises with the shared statistics alone (FBN).
        statistics_pass: the pass that measures the statistics.
        needs_running: whether torch's BatchNorm layers must have running statistics.
        frozen: roles of tensors that do not change in frozen rounds.
        frozen_rate: the upper limit of the learning rate in rounds with frozen statistics, as a share of the
            highest rate before them. See ``learning_rate``.
        scale: the standard deviation that ``federation.unit_scale`` gives to every BatchNorm layer's input at
            the start of training. This needs shared statistics at the start.
        bounded_scale: the value of ``scale`` in bounded training, see ``bounded``. None: ``scale``.
        bounded_frozen_rate: the value of ``frozen_rate`` in bounded training. None: ``frozen_rate``.
        centre: whether gradients of weights are centred, so that they ignore the mean of the inputs
            (``federation.gradients``). None: in rounds with frozen statistics.
        restarts: whether a client's optimiser loses its state, such as momentum, after a step with a
            layer-wise exchange.
        adversary: Byzantine clients, for experiments.
        fraction: the share of the clients per round for which the method chose its options (HBN's tracking).
            None: any.
    """

    name: str
    layer: Callable[[_BatchNorm], nn.Module] | None = None
    prepare: Callable[[nn.Module], nn.Module] | None = None
    local: frozenset[Role] = frozenset()
    local_in: Callable[[str, int], frozenset[Role]] | None = None
    report: StatisticsReport = StatisticsReport.NOTHING
    combine: Callable[[LayerReports], Running] = keep
    phase: Callable[[int, int], Phase] = always_train
    refresh: Refresh = Refresh.NOTHING
    refreshed_by: str = EVERYONE
    renew: Callable[[LayerReports], Running] = replace_by_pooled
    calibrate: bool = False
    constant: bool = False
    statistics_pass: StatisticsPass = StatisticsPass.for_exchange(INPUTS)
    needs_running: bool = False
    frozen: frozenset[Role] = frozenset({Role.STATISTIC})
    frozen_rate: float = 1.0
    scale: float = 1.0
    bounded_scale: float | None = None
    bounded_frozen_rate: float | None = None
    centre: bool | None = None
    restarts: bool = False
    adversary: Adversary | None = None
    fraction: float | None = None

    def other_fraction(self, share: float) -> str:
        """Say that a round has a smaller share of the clients than the options are for, else nothing."""
        if self.fraction != 1 or share >= 1:
            return ""
        return f"{self.name} follows the statistics as if all clients took part in every round: give {self.name}(fraction={share:g})"

    def place(self, role: Role, home: frozenset[Role] = frozenset()) -> Place:
        """Return where tensors of this role live, if the roles ``home`` stay at home in their layer."""
        local = self.local | home
        if role in local or role is Role.KEPT or (role is Role.RECOMPUTED and Role.WEIGHT in local):
            return Place.HOME
        if role in DOWN_ONLY:
            return Place.DOWN_ONLY
        return {Role.COUNTER: Place.COUNTER, Role.STATISTIC: Place.STATISTIC}.get(role, Place.SHARED)

    def home(self, layer: str, index: int) -> frozenset[Role]:
        """Return the roles that stay at home in one BatchNorm layer, beside ``local``."""
        return frozenset() if self.local_in is None else self.local_in(layer, index)

    def shares(self, role: Role) -> bool:
        """Return whether tensors of this role are shared, but for layers with ``local_in``."""
        return self.place(role) in (Place.SHARED, Place.STATISTIC)

    def keeps(self, role: Role) -> bool:
        """Return whether all tensors of this role stay at their client."""
        return self.place(role) is Place.HOME

    def reports(self, phase: Phase) -> StatisticsReport:
        """Return the kind of statistics that a client reports in this phase."""
        if self.freezes_statistics(phase):
            return StatisticsReport.NOTHING
        return StatisticsReport.PASS if phase is Phase.MEASURE else self.report

    def measures_cohort(self, round: int) -> bool:
        """Return whether only the cohort takes part in a statistics-only exchange after ``round``.

        The exchange before round 1, in which all clients take part, counts as round 0.
        """
        return round > 0 and self.refreshed_by == COHORT

    def freezes_statistics(self, phase: Phase) -> bool:
        """Return whether the statistics are frozen in this phase."""
        return phase is Phase.FROZEN and Role.STATISTIC in self.frozen

    def centres(self, phase: Phase) -> bool:
        """Return whether gradients are centred in this phase."""
        return self.freezes_statistics(phase) if self.centre is None else self.centre

    def learning_rate(self, schedule: Callable[[int, int], float], round: int, rounds: int) -> float:
        """Return the learning rate of ``round``.

        While the statistics are frozen, the rate of ``schedule(round, rounds)`` is limited to ``frozen_rate``
        times the highest rate before the freeze. There is no limit if the statistics are frozen from round 1
        on, or all rates before are 0.
        """
        rate = schedule(round, rounds)
        if self.frozen_rate == 1 or not self.freezes_statistics(self.phase(round, rounds)):
            return rate
        before = [schedule(earlier, rounds) for earlier in range(1, round) if not self.freezes_statistics(self.phase(earlier, rounds))]
        highest = max(before, default=0.0)
        return min(rate, self.frozen_rate * highest) if highest else rate

    def uses_shared(self, rounds: int) -> bool:
        """Return whether the shared statistics, alone or in a mixture, normalise the run's first batch."""
        frozen = self.freezes_statistics(self.phase(1, rounds))
        return self.calibrate or (self.shares(Role.STATISTIC) and (self.constant or frozen))

    @property
    def has_statistics(self) -> bool:
        """Return whether the server combines BatchNorm's statistics, perhaps only for evaluations."""
        return self.report is not StatisticsReport.NOTHING or self.refresh is not Refresh.NOTHING

    @property
    def at_clients(self) -> str:
        """Return, as text, the options that decide what a client computes. The server needs the same ones.

        Options that only the server uses, such as ``freeze_after``, are left out, and values without a text,
        such as functions.
        """
        parts: dict[str, Any] = {
            "report": self.report,
            "local": sorted(role.value for role in self.local),
            "frozen": sorted(role.value for role in self.frozen),
            "pass": self.statistics_pass,
            "centre": self.centre,
            "restarts": self.restarts,
        }
        for name, made in (("layer", self.layer), ("prepare", self.prepare)):
            given = sorted(made.keywords.items()) if isinstance(made, partial) else ()
            parts |= {f"{name}.{key}": value for key, value in given if isinstance(value, int | float | str | Enum | None)}
        return ", ".join(f"{key}={value}" for key, value in parts.items())

    @property
    def starts_small(self) -> bool:
        """Return whether bounded training begins with BatchNorm's inputs at ``bounded_scale``."""
        return self.bounded_scale is not None and bool(self.centre)

    def bounded(self) -> Method:
        """Return a copy of the method for bounded training, that is, with clipped gradients.

        ``bounded_scale`` replaces ``scale`` if the method centres gradients in every round, and
        ``bounded_frozen_rate`` replaces ``frozen_rate`` if it centres them in frozen rounds. Without
        centring, a smaller scale lowers the accuracy, and frozen rounds at the full learning rate end at
        chance level.
        """
        scale = self.bounded_scale if self.bounded_scale is not None and self.centre else self.scale
        share = self.bounded_frozen_rate if self.bounded_frozen_rate is not None and self.centres(Phase.FROZEN) else self.frozen_rate
        return replace(self, scale=scale, frozen_rate=share)

    @property
    def needs_batch_norm(self) -> bool:
        """Return whether a network without BatchNorm is refused."""
        return self.has_statistics and self.name != "fedavg"

    @property
    def pools(self) -> bool:
        """Return whether clients report moments, which the server pools."""
        return self.report in MOMENTS

    @property
    def measures_first(self) -> bool:
        """Return whether a client measures statistics in a pass over its data before it trains."""
        return self.report is StatisticsReport.PASS

    @property
    def exchanges(self) -> bool:
        """Return whether clients exchange statistics layer by layer in their first local step (FedTAN)."""
        return Phase.EXCHANGE in (self.phase(1, 2), self.phase(2, 2))

    @property
    def personal(self) -> bool:
        """Return whether every client keeps BatchNorm tensors, and so has a model of its own."""
        return self.local_in is not None or bool(self.local & {Role.AFFINE, Role.STATISTIC})


FROZEN_RATE = 0.1
"""Share of the learning rate after the freeze in FixBN. Its paper divides by ten (section 5, Table G)."""
BOUNDED_FROZEN_RATE = 0.15
"""Share of the learning rate after the freeze for every method, in bounded training with centred gradients.

It is the largest that was tried at which accuracy never fell more than 2 points below its level at the
freeze: docs/methods/fixbn.md.
"""


def freeze(
    method: Method,
    after: int | None = None,
    what: frozenset[Role] = frozenset({Role.STATISTIC}),
    rate: float | None = None,
    unbounded_rate: float = FROZEN_RATE,
) -> Method:
    """Return a copy of ``method`` that freezes BatchNorm tensors after some rounds (FixBN, FedTAN-II).

    In frozen rounds, BatchNorm layers normalise with the statistics of round ``after``, bit for bit. All
    parameters are still trained, and no statistics are reported. A network with constant statistics depends
    on the scale of its weights, and its gradient contains the mean of a layer's input, so it collapses at a
    high learning rate. So frozen rounds centre gradients and reduce the rate (``Method.learning_rate``).

    Args:
        method: the method of the rounds before the freeze.
        after: last round before the freeze. Default: half of the rounds.
        what: roles of the tensors that freeze: statistics, affine parameters, or both (FixBN's Table H).
            Frozen affine parameters are not given to the optimiser.
        rate: upper limit of the learning rate in frozen rounds, as a share of the highest rate before them,
            in (0, 1]. 1: no limit. Default: ``BOUNDED_FROZEN_RATE`` in bounded training (``Method.bounded``)
            with centred gradients, else ``unbounded_rate``.
        unbounded_rate: the default of ``rate`` in all other training.

    Raises:
        ValueError: statistics are to freeze, but the method has no running statistics in training.
    """
    share = unbounded_rate if rate is None else rate
    if Role.STATISTIC in what and method.report is StatisticsReport.NOTHING and Role.STATISTIC not in method.local:
        raise ValueError(f"{method.name} has no running statistics in training, so it cannot freeze them: leave freeze-after out")
    return replace(
        method,
        phase=partial(_freeze_phase, method.phase, after),
        needs_running=True,
        frozen=what,
        frozen_rate=share,
        bounded_frozen_rate=BOUNDED_FROZEN_RATE if rate is None else None,
    )


def freeze_after() -> Any:
    """Declare the option ``freeze-after``, for methods that always freeze (FixBN, FedTAN-II)."""
    return option(None, "last round before the statistics freeze; -1: half of the rounds", ">= 0", key="freeze-after", unset=-1)


def frozen_rate() -> Any:
    """Declare the limit of the learning rate in frozen rounds, for the same methods as ``freeze_after``."""
    return option(
        None,
        "upper limit of the learning rate in rounds with frozen statistics, as a share of the highest rate before them; 1: the schedule "
        "alone decides",
        "(0, 1]",
        unset=0.0,
        hidden=True,
    )


def _freeze_phase(before: Callable[[int, int], Phase], after: int | None, round: int, rounds: int) -> Phase:
    last = rounds // 2 if after is None else after
    return before(round, rounds) if round <= last else Phase.FROZEN


def attacked(method: Method, attack: str | Attack, f: int, on: str = "both", strength: float = 0.0) -> Method:
    """Return a copy of ``method`` for experiments, with the last ``f`` clients of all Byzantine.

    The Byzantine clients know all honest replies, and collude. For the options see
    ``robust.attacks.Adversary``.

    Raises:
        ValueError: the method shares no tensors.
    """
    if not any(map(method.shares, Role)):
        raise ValueError(f"{method.name} shares no tensors, so no client can attack it: leave out the attack")
    return replace(method, adversary=Adversary(attack, f, on, strength))
