"""Define a method: its BatchNorm layer, local tensors, reports, and their combination."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        FROZEN: local training with frozen BatchNorm tensors (``Method.frozen``).
            Frozen statistics are not reported.
        MEASURE: statistics without training.
        EXCHANGE: local training, in whose first step the clients average every
            layer's moments (FedTAN).
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
        PASS: moments of the layers' inputs, from a pass before training.
        MOVING: moving averages over the training batches.
    """

    NOTHING = "nothing"
    RUNNING = "running statistics after training"
    BATCHES = "moments of the training batches"
    FIRST = "moments of the first training batch"
    PASS = "moments of a pass before training"
    MOVING = "moving averages over the training batches"


class Place(Enum):
    """Name where a tensor lives.

    Attributes:
        SHARED: sent both ways, trained at clients, averaged.
        STATISTIC: running statistics, sent down. The server combines the clients'
            reports.
        HOME: stored by its client, and never sent.
        DOWN_ONLY: the server's; clients receive it and never send it.
        COUNTER: never sent or averaged, as an average need not be an integer.
    """

    SHARED = "shared"
    STATISTIC = "shared, combined by the server"
    HOME = "stays at its client"
    DOWN_ONLY = "the server's, sent to the clients, never averaged"
    COUNTER = "never sent, never averaged"


OBSERVED = (StatisticsReport.BATCHES, StatisticsReport.FIRST, StatisticsReport.MOVING)
"""Reports on training batches."""
MOMENTS = (*OBSERVED, StatisticsReport.PASS)


class Refresh(Enum):
    """Name how the shared statistics are updated before an evaluation.

    Attributes:
        NOTHING: the statistics of training are evaluated.
        EXACT: passes in evaluation mode. After pass p, layers 1..p have the
            statistics of the union of all data. One pass is enough if clients
            exchange statistics layer by layer (``RECALIBRATIONS``).
        HYBRID: one pass in training mode. It measures what every layer normalises
            with.
        REPORTED: no pass. The round's reports are combined.
    """

    NOTHING = "nothing"
    EXACT = "exact"
    HYBRID = "hybrid"
    REPORTED = "reported"


INPUTS, NORMALISERS = MEASURED = ("inputs", "normalisers")
EVERYONE, COHORT = "all", "cohort"
"""Clients whose statistics are evaluated: all, or those of the round."""


AS_TRAINED = -1
"""A statistics pass over as many samples as the client trains on in the round."""
FEWEST = 64
"""The fewest samples of such a pass, if the client has so many: that of HBN's code."""


@dataclass(frozen=True)
class StatisticsPass:
    """Describe a pass over a client's data that measures BatchNorm layers, and changes no state.

    Attributes:
        lower_layers: how the layers below the measured one normalise. ``shared``:
            as in evaluation; combining the clients' moments is then exact in every
            layer. ``hybrid``: as in training; it is then exact in the first layer
            only.
        samples: size of a seeded random subset. 0: all. ``AS_TRAINED``: as many as
            the client weighs in the round, which it trains on unless it counts for
            all it has, but at least ``FEWEST``.
        measured: ``inputs``: moments of the layers' inputs. ``normalisers``: the
            mean and variance that normalise a training batch (``Refresh.HYBRID``).
    """

    lower_layers: str
    samples: int = 0
    measured: str = "inputs"

    def size(self, samples: int, trained: int) -> int:
        """Return the pass's size for ``samples`` at the client, ``trained`` in the round."""
        wanted = max(FEWEST, trained) if self.samples == AS_TRAINED else self.samples or samples
        return min(wanted, samples)

    @classmethod
    def for_exchange(cls, measured: str, samples: int = 0) -> StatisticsPass:
        """Return the pass of a statistics-only exchange, over all data if ``samples`` is 0 or ``AS_TRAINED``."""
        return cls("hybrid", max(samples, 0), measured) if measured == NORMALISERS else cls("shared", 0, measured)


@dataclass(frozen=True)
class LayerReports:
    """Hold the clients' reports on one layer, and what the server's rule needs.

    Attributes:
        parts: one ``Moments`` per client.
        steps: the clients' training batches: a mean, weighted by the counts of
            ``parts``.
        pace: the learning rate divided by that of round 1.
        average: combines n clients' values.
        scale: the standard deviation of the layer's input at the start, to which
            the server rescaled it (``federation.unit_scale``); infinite if it did
            not.
    """

    shared: Running
    parts: Sequence[Moments]
    steps: float
    pace: float = 1.0
    average: Average = weighted_mean
    scale: float = math.inf


def replace_by_pooled(reports: LayerReports) -> Running:
    """Replace a layer's shared statistics by the pooled reports."""
    return _unbiased(pool(reports.parts, reports.average))


def replace_by_averaged(reports: LayerReports) -> Running:
    """Replace a layer's shared statistics by the average report (HBN's second ablation)."""
    return _unbiased(plain_average(reports.parts, reports.average))


def _unbiased(moments: Moments) -> Running:
    return Running(moments.mean, moments.bessel())


def keep(reports: LayerReports) -> Running:
    """Return the shared statistics unchanged."""
    return reports.shared


def always_train(round: int, rounds: int) -> Phase:
    """Return the phase TRAIN for every round."""
    return Phase.TRAIN


@dataclass(frozen=True)
class Method:
    """Define one way of doing batch normalisation in federated learning.

    Attributes:
        name: as in the run config and in reports.
        layer: replaces a BatchNorm layer. None: torch's stays.
        prepare: changes the rest of the converted network. The log shows its
            docstring's first line.
        local: roles of tensors that never leave their client, which stores them.
        local_in: ``layers -> {layer: roles}``: from the names of all BatchNorm
            layers, in order, the roles that are local in some of them, beside
            ``local``. If statistics are among them, ``layer`` does not replace it.
            None: all layers are alike.
        report: what clients report after training.
        combine: computes new shared statistics from the reports on a layer.
        phase: ``(round, rounds) -> Phase``. Rounds count from 1.
        refresh: the statistics-only exchange before an evaluation (HBN).
        refreshed_by: the clients in it: ``all``, or the round's ``cohort``.
        renew: computes shared statistics from the reports of that exchange.
        calibrate: whether statistics are measured before round 1, because training
            uses them.
        constant: whether training normalises with the shared statistics alone
            (FBN).
        statistics_pass: how statistics are measured.
        needs_running: whether torch's BatchNorm layers must have running
            statistics.
        frozen: roles of tensors that stay in frozen rounds.
        frozen_rate: the highest learning rate in rounds with frozen statistics, as
            a share of that before them.
        scale: the standard deviation that ``federation.unit_scale`` gives to
            BatchNorm inputs at the start. This needs shared statistics.
        bounded_scale: ``scale`` in bounded training, see ``bounded``. None: the
            same.
        bounded_frozen_rate: ``frozen_rate`` in bounded training. None: the same.
        centre: whether gradients of weights are centred, so that they ignore the
            inputs' mean (``federation.gradients``). None: in rounds with frozen
            statistics.
        restarts: whether the optimiser loses its state, such as momentum, after a
            step with a layer-wise exchange.
        adversary: Byzantine clients, for experiments.
        fraction: the share of clients per round for which options were chosen
            (HBN's tracking). None: any.
    """

    name: str
    layer: Callable[[_BatchNorm], nn.Module] | None = None
    prepare: Callable[[nn.Module], nn.Module] | None = None
    local: frozenset[Role] = frozenset()
    local_in: Callable[[Sequence[str]], Mapping[str, frozenset[Role]]] | None = None
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
        """Say that a round has a smaller share of clients than the options are for, else nothing."""
        if self.fraction != 1 or share >= 1:
            return ""
        return f"{self.name} follows the statistics as if all clients took part in every round: give {self.name}(fraction={share:g})"

    def place(self, role: Role, home: frozenset[Role] = frozenset()) -> Place:
        """Return where tensors of this role live, if ``home`` stay at home in their layer."""
        local = self.local | home
        if role in local or role is Role.KEPT or (role is Role.RECOMPUTED and Role.WEIGHT in local):
            return Place.HOME
        if role in DOWN_ONLY:
            return Place.DOWN_ONLY
        return {Role.COUNTER: Place.COUNTER, Role.STATISTIC: Place.STATISTIC}.get(role, Place.SHARED)

    def home(self, layers: Iterable[str]) -> Mapping[str, frozenset[Role]]:
        """Return layer -> the roles that stay at home in it alone, beside ``local``.

        Raises:
            ValueError: ``local_in`` names a layer that is not in ``layers``.
        """
        names = tuple(layers)
        home = self.local_in(names) if self.local_in and names else {}
        if other := home.keys() - {*names}:
            raise ValueError(f"{self.name} keeps {min(other)} at home, but the network's BatchNorm layers are {', '.join(names)}")
        return home

    def shares(self, role: Role) -> bool:
        """Return whether this role is shared, but for layers with ``local_in``."""
        return self.place(role) in (Place.SHARED, Place.STATISTIC)

    def keeps(self, role: Role) -> bool:
        """Return whether all tensors of this role stay at home."""
        return self.place(role) is Place.HOME

    def reports(self, phase: Phase) -> StatisticsReport:
        """Return what a client reports in this phase."""
        if self.freezes_statistics(phase):
            return StatisticsReport.NOTHING
        return StatisticsReport.PASS if phase is Phase.MEASURE else self.report

    def measures_cohort(self, round: int) -> bool:
        """Return whether only the cohort joins the statistics-only exchange after ``round``.

        All clients join the one before round 1, which is round 0 here.
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

        While statistics are frozen, ``schedule(round, rounds)`` is limited to
        ``frozen_rate`` times the highest rate before the freeze, unless that is 0
        or the freeze starts in round 1.
        """
        rate = schedule(round, rounds)
        if self.frozen_rate == 1 or not self.freezes_statistics(self.phase(round, rounds)):
            return rate
        before = [schedule(earlier, rounds) for earlier in range(1, round) if not self.freezes_statistics(self.phase(earlier, rounds))]
        highest = max(before, default=0.0)
        return min(rate, self.frozen_rate * highest) if highest else rate

    def uses_shared(self, rounds: int) -> bool:
        """Return whether the run's first batch is normalised with shared statistics, perhaps in a mixture."""
        frozen = self.freezes_statistics(self.phase(1, rounds))
        return self.calibrate or (self.shares(Role.STATISTIC) and (self.constant or frozen))

    @property
    def has_statistics(self) -> bool:
        """Return whether the server combines statistics, perhaps only for evaluations."""
        return self.report is not StatisticsReport.NOTHING or self.refresh is not Refresh.NOTHING

    @property
    def at_clients(self) -> str:
        """Return, as text, the options that decide what a client computes.

        The server needs the same ones. Its own options, such as ``freeze_after``,
        and functions are left out.
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
        """Return whether bounded training begins with ``bounded_scale``."""
        return self.bounded_scale is not None and bool(self.centre)

    def bounded(self) -> Method:
        """Return a copy of the method for training with clipped gradients.

        ``bounded_scale`` applies if the method centres gradients in every round,
        and ``bounded_frozen_rate`` if it centres them in frozen rounds. Without
        centring, a smaller scale lowers the accuracy, and frozen rounds at the full
        learning rate end at chance level.
        """
        scale = self.bounded_scale if self.bounded_scale is not None and self.centre else self.scale
        share = self.bounded_frozen_rate if self.bounded_frozen_rate is not None and self.centres(Phase.FROZEN) else self.frozen_rate
        return replace(self, scale=scale, frozen_rate=share)

    @property
    def pools(self) -> bool:
        """Return whether the server pools moments that clients report."""
        return self.report in MOMENTS

    @property
    def exchanges(self) -> bool:
        """Return whether clients exchange statistics layer by layer (FedTAN)."""
        return Phase.EXCHANGE in (self.phase(1, 2), self.phase(2, 2))

    @property
    def personal(self) -> bool:
        """Return whether every client keeps BatchNorm tensors, so has its own model."""
        return self.local_in is not None or bool(self.local & {Role.AFFINE, Role.STATISTIC})


FROZEN_RATE = 0.1
"""FixBN's share of the learning rate after the freeze: a tenth (section 5, Table G)."""
BOUNDED_FROZEN_RATE = 0.15
"""Share of the learning rate after a freeze, where training is bounded and centred.

It is the largest tried at which accuracy never fell over 2 points below that at the
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

    In frozen rounds, BatchNorm layers normalise with the statistics of round
    ``after``, bit for bit. All parameters are still trained. The network then
    depends on its weights' scale, and its gradient contains the mean of a layer's
    input, so it collapses at a high learning rate. So frozen rounds centre
    gradients and reduce the rate.

    Args:
        method: for the rounds before.
        after: last round before the freeze. Default: half of the rounds.
        what: roles of the tensors that freeze: statistics, affine parameters, or
            both (Table H). The optimiser does not get frozen parameters.
        rate: the highest learning rate in frozen rounds, as a share of that before,
            in (0, 1]. 1: no limit. Default: ``BOUNDED_FROZEN_RATE`` in bounded
            training with centred gradients, else ``unbounded_rate``.
        unbounded_rate: the default of ``rate`` otherwise.

    Raises:
        ValueError: the method has no running statistics in training to freeze.
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
    """Declare ``freeze-after``, for methods that always freeze (FixBN, FedTAN-II)."""
    return option(None, "last round before the statistics freeze; -1: half of the rounds", ">= 0", key="freeze-after", unset=-1)


def frozen_rate() -> Any:
    """Declare the limit of the learning rate in frozen rounds."""
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
    """Return a copy of ``method`` whose last ``f`` clients are Byzantine, for experiments.

    They know all honest replies, and collude: ``robust.attacks.Adversary``.

    Raises:
        ValueError: the method shares no tensors.
    """
    if not any(map(method.shares, Role)):
        raise ValueError(f"{method.name} shares no tensors, so no client can attack it: leave out the attack")
    return replace(method, adversary=Adversary(attack, f, on, strength))
