"""What a method is: a frozen record of the layer, the roles that stay home, what is reported, and how the server combines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.moments import Average, Moments, Running, plain_average, pool, weighted_mean
from fl_bn.options import option
from fl_bn.robust.attacks import Adversary, Attack
from fl_bn.roles import DOWN_ONLY, Role
from fl_bn.support.names import check_name


class Phase(Enum):
    """What one message to the cohort is for."""

    TRAIN = "train"
    FROZEN = "frozen"  # train, with the statistics frozen and unreported
    MEASURE = "measure"  # statistics only: no training
    EXCHANGE = "exchange"  # layer-wise exchange during the first local step


class Report(Enum):
    """What a client says about its statistics."""

    NOTHING = "nothing"
    RUNNING = "running statistics after training"
    BATCHES = "moments of the training batches"
    FIRST = "moments of the first training batch"
    PASS = "moments of a pass before training"
    MOVING = "moving averages over the training batches"


MOMENTS = (Report.BATCHES, Report.FIRST, Report.PASS, Report.MOVING)


class Refresh(Enum):
    """How the shared statistics are brought up to the weights before these are evaluated and saved."""

    NOTHING = "nothing"  # they are evaluated as they were trained with
    EXACT = "exact"  # passes in evaluation mode, pass p makes layers 1..p those of the union of all data
    HYBRID = "hybrid"  # one pass in training mode: the moments of what every layer normalises with
    REPORTED = "reported"  # no pass: what the round's clients reported, combined


_NEVER_AVERAGED = DOWN_ONLY | {Role.COUNTER, Role.KEPT}
INPUTS, NORMALISERS = MEASURED = ("inputs", "normalisers")
LOWER_LAYERS = ("shared", "hybrid")
EVERYONE, COHORT = WHO = ("all", "cohort")
"""Whose statistics are evaluated: all clients', or those of the clients that trained in the round."""


@dataclass(frozen=True)
class StatisticsPass:
    """A pass over a client's data that measures every BatchNorm layer's input: no gradient, no change of state.

    ``lower_layers`` are normalised with the ``shared`` statistics, as in evaluation (the merge is then exact in every layer), or as in
    training (``hybrid``; exact in the first layer). ``samples`` of a seeded random subset, 0 for all. ``measured`` are the layers'
    ``inputs``, raw, or their ``normalisers``: mean and variance that a training batch is normalised with (``Refresh.HYBRID``).
    """

    lower_layers: str
    samples: int = 0
    measured: str = "inputs"

    def __post_init__(self) -> None:
        check_name("lower_layers", self.lower_layers, LOWER_LAYERS)
        check_name("measured", self.measured, MEASURED)

    @classmethod
    def asked(cls, measured: str, samples: int = 0) -> StatisticsPass:
        """The pass of a statistics-only exchange, all clients' at once: of inputs over all data, as evaluation normalises them; of
        normalisers as training has them, over ``samples``."""
        return cls("hybrid", samples, measured) if measured == NORMALISERS else cls("shared", 0, measured)


@dataclass(frozen=True)
class LayerReports:
    """All the server knows about one layer when it combines.

    ``shared``: the statistics sent down this round; ``parts``: one ``Moments`` per client, in partition order; ``momentum``: the
    layer's own; ``steps``: training batches per client (mean, weighted by their activations); ``average``: how n clients' values become
    one; ``pace``: the round's learning rate as a share of the first round's; ``scale``: the deviation of its input that the run started
    with, where the server brought it there (``federation.unit_scale``), else 1.
    """

    shared: Running
    parts: Sequence[Moments]
    momentum: float
    steps: float
    average: Average = weighted_mean
    pace: float = 1.0
    scale: float = 1.0


def replace_by_pooled(reports: LayerReports) -> Running:
    """Forget the old statistics: what a statistics-only exchange with all clients measured is all there is to know."""
    return _unbiased(pool(reports.parts, reports.average))


def replace_by_averaged(reports: LayerReports) -> Running:
    """Return the statistics that ``replace_by_pooled`` would, without the spread of the clients' means (HBN's second ablation)."""
    return _unbiased(plain_average(reports.parts, reports.average))


def _unbiased(moments: Moments) -> Running:
    return Running(moments.mean, moments.bessel())


def keep(reports: LayerReports) -> Running:
    """The statistics do not change."""
    return reports.shared


def always_train(round: int, rounds: int) -> Phase:
    return Phase.TRAIN


@dataclass(frozen=True)
class Method:
    """One way of doing batch normalisation in federated learning.

    ``layer`` replaces each BatchNorm (None: torch's own stays); ``prepare`` then changes the rest of the (copied) network. Tensors with
    a role in ``local`` never leave their client and survive between its rounds. ``combine`` maps one layer's reports to its new shared
    statistics. ``phase(round, rounds)`` is the calendar, rounds counted from 1. ``refresh``: the shared statistics lag behind the
    weights (HBN), so statistics-only exchanges precede each evaluation: with ``refreshed_by``, all clients or the round's cohort, whose
    reports ``renew`` makes into statistics. ``calibrate``: training uses the shared statistics, so they are
    measured before round 1; ``constant``: it normalises with nothing else (FBN). ``needs_running``: torch's BatchNorm will not do without
    running statistics. ``frozen``: what does not change in frozen rounds. ``frozen_rate``: the share of the learning rate that rounds with
    frozen statistics run at, at most (``learning_rate``). ``scale``: the deviation of every BatchNorm layer's input that training starts
    with, where it starts with shared statistics (``federation.unit_scale``). ``bounded_scale``, ``bounded_frozen_rate``: others, where the
    loop bounds how far a client may move the weights in a round (``bounded``). ``centre``: gradients of weights lose their mean over the
    inputs (``federation.centring``) in every round, or in none; None: in rounds with frozen statistics. ``restarts``: after a step that was
    exchanged, the clients' optimisers begin anew. ``adversary``: clients that lie, in experiments.
    """

    name: str
    layer: Callable[[_BatchNorm], nn.Module] | None = None
    prepare: Callable[[nn.Module], nn.Module] | None = None
    local: frozenset[Role] = frozenset()
    report: Report = Report.NOTHING
    combine: Callable[[LayerReports], Running] = keep
    phase: Callable[[int, int], Phase] = always_train
    refresh: Refresh = Refresh.NOTHING
    refreshed_by: str = EVERYONE
    renew: Callable[[LayerReports], Running] = replace_by_pooled
    calibrate: bool = False
    constant: bool = False
    statistics_pass: StatisticsPass = StatisticsPass.asked(INPUTS)
    needs_running: bool = False
    frozen: frozenset[Role] = frozenset({Role.STATISTIC})
    frozen_rate: float = 1.0
    scale: float = 1.0
    bounded_scale: float | None = None
    bounded_frozen_rate: float | None = None
    centre: bool | None = None
    restarts: bool = False
    adversary: Adversary | None = None

    def shares(self, role: Role) -> bool:
        """Whether tensors of this role travel both ways. Counters never do: averaging them yields 0, or 49.999 -> 49."""
        return role not in self.local and role not in _NEVER_AVERAGED

    def keeps(self, role: Role) -> bool:
        """Whether tensors of this role stay at their client and survive between its rounds."""
        return role in self.local or role is Role.KEPT or (role is Role.RECOMPUTED and Role.WEIGHT in self.local)

    def sends_down(self, role: Role) -> bool:
        """Whether clients receive the server's tensors of this role and send none back."""
        return role in DOWN_ONLY and not self.keeps(role)

    def reports(self, phase: Phase) -> Report:
        """What a client reports in this phase."""
        if self.freezes_statistics(phase):
            return Report.NOTHING
        return Report.PASS if phase is Phase.MEASURE else self.report

    def measures_cohort(self, round: int) -> bool:
        """Tell whether a statistics-only exchange after ``round`` asks its cohort alone. Before round 1, as round 0, all are asked."""
        return round > 0 and self.refreshed_by == COHORT

    def freezes_statistics(self, phase: Phase) -> bool:
        """Whether the statistics do not change in this phase."""
        return phase is Phase.FROZEN and Role.STATISTIC in self.frozen

    def centres(self, phase: Phase) -> bool:
        """Tell whether gradients are centred in this phase."""
        return self.freezes_statistics(phase) if self.centre is None else self.centre

    def learning_rate(self, schedule: Callable[[int, int], float], round: int, rounds: int) -> float:
        """Return the learning rate of ``round``: that of ``schedule``, but while the statistics are frozen at most ``frozen_rate`` times
        the highest rate of the rounds before the freeze.

        So a schedule that has dropped as far by itself is not dropped once more. Where the statistics are frozen from round 1 on, no round
        is before the freeze, and the schedule holds.

        Args:
            schedule: ``(round, rounds) -> learning rate``.
            round: From 1.
            rounds: Of the whole run.
        """
        rate = schedule(round, rounds)
        if self.frozen_rate == 1 or not self.freezes_statistics(self.phase(round, rounds)):
            return rate
        before = [schedule(earlier, rounds) for earlier in range(1, round) if not self.freezes_statistics(self.phase(earlier, rounds))]
        return min(rate, self.frozen_rate * max(before)) if before else rate

    def starts_constant(self, rounds: int) -> bool:
        """Whether the first batch is normalised with shared statistics and nothing else."""
        frozen = self.freezes_statistics(self.phase(1, rounds))
        return self.shares(Role.STATISTIC) and (self.constant or frozen)

    def uses_shared(self, rounds: int) -> bool:
        """Whether shared statistics have a part in normalising the first batch: they are calibrated before."""
        return self.calibrate or self.starts_constant(rounds)

    def bounded(self) -> Method:
        """Return the method for a loop that clips gradients where steps would lead too far.

        Without centring a smaller scale does harm, and frozen rounds at the full rate end at chance.
        """
        scale = self.bounded_scale if self.bounded_scale is not None and self.centre else self.scale
        share = self.bounded_frozen_rate if self.bounded_frozen_rate is not None and self.centres(Phase.FROZEN) else self.frozen_rate
        return replace(self, scale=scale, frozen_rate=share)

    @property
    def personal(self) -> bool:
        """Whether every client evaluates a model of its own (FedBN, SiloBN)."""
        return bool(self.local & {Role.AFFINE, Role.STATISTIC})


FROZEN_RATE = 0.1
"""FixBN's: the paper freezes when it divides the learning rate by ten (seed 000, section 4.2, section 5 and Table G)."""
BOUNDED_FROZEN_RATE = 0.3
"""Of every method, where gradients are centred and clipped. At 1 a constant rate with many local steps fell after the freeze."""


def freeze(
    method: Method,
    after: int | None = None,
    what: frozenset[Role] = frozenset({Role.STATISTIC}),
    rate: float | None = None,
    unbounded_rate: float = FROZEN_RATE,
) -> Method:
    """``method`` for the first ``after`` rounds (default: half of them), then with its statistics frozen (FixBN, FedTAN-II).

    In frozen rounds BatchNorm layers normalise with the statistics of round ``after``, bit for bit; affine and everything else
    keep training, and nothing about statistics is reported. ``what``: FixBN's Table H freezes the affine parameters as well, or these
    alone, which then are in no optimiser.

    With constants a network is no longer invariant to the scale of its weights, nor its gradient free of the mean of a layer's input, and
    frozen at a high learning rate it collapses. So rounds with frozen statistics centre gradients (``federation.centring``), and run at no
    more than the share ``rate`` of the learning rate before, see ``Method.learning_rate``; with 1 the schedule holds. Default:
    ``BOUNDED_FROZEN_RATE`` where gradients are centred and clipped (``Method.bounded``), else ``unbounded_rate``.

    Raises:
        ValueError: ``what`` is nothing that freezes, ``after`` is negative, ``rate`` is not in (0, 1], or there are no statistics.
    """
    share = unbounded_rate if rate is None else rate
    if not 0 < share <= 1:
        raise ValueError(f"the share of the learning rate in frozen rounds must be in (0, 1], but got {share}")
    if not what or not what <= {Role.STATISTIC, Role.AFFINE}:
        raise ValueError(f"what freezes must be the statistics, the affine parameters or both, but got {set(what)}")
    if after is not None and after < 0:
        raise ValueError(f"freeze after must be a round >= 0, but got {after}")
    if Role.STATISTIC in what and method.refresh is not Refresh.NOTHING and method.report is Report.NOTHING:
        raise ValueError(f"{method.name} knows no statistics in training, so there are none to freeze: leave out freeze after")
    return replace(
        method,
        phase=partial(_freeze_phase, method.phase, after),
        needs_running=True,
        frozen=what,
        frozen_rate=share,
        bounded_frozen_rate=BOUNDED_FROZEN_RATE if rate is None else None,
    )


def freeze_after() -> Any:
    """The option of methods that freeze by themselves; a run config can freeze the statistics of any other by the same key."""
    return option(None, "last round before the statistics freeze", ">= 0", key="freeze-after", unset=-1, otherwise="half of the rounds")


def frozen_rate(unbounded: float = FROZEN_RATE) -> Any:
    """The option beside it: ``unbounded`` is the method's share where gradients are not clipped."""
    return option(
        None,
        "most that rounds with frozen statistics run at, as a share of the learning rate before; 1: the schedule alone decides",
        "(0, 1]",
        key="frozen-rate",
        unset=0.0,
        otherwise=f"{BOUNDED_FROZEN_RATE:g} where gradients are clipped, else {unbounded:g}",
    )


def _freeze_phase(before: Callable[[int, int], Phase], after: int | None, round: int, rounds: int) -> Phase:
    last = rounds // 2 if after is None else after
    return before(round, rounds) if round <= last else Phase.FROZEN


def attacked(method: Method, attack: str | Attack, f: int, on: str = "both", strength: float = 0.0) -> Method:
    """``method`` in a run in which the last ``f`` clients are Byzantine, know all honest replies, and collude.

    See ``robust.attacks.Adversary``.
    """
    if not any(map(method.shares, Role)):
        raise ValueError(f"{method.name} shares nothing, so nobody can attack it")
    return replace(method, adversary=Adversary(attack, f, on, strength))
