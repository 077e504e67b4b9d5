"""Combine the clients' replies: average weights, combine statistics, or defend both.

Large tensors are processed in blocks that fit into the cache. A ``Defence`` is for
runs in which some clients may be Byzantine (send false values).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Average, Moments, Running, weighted_mean
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.values import Named
from fl_bn.methods import LayerReports
from fl_bn.options import Used, option
from fl_bn.robust import RULES, Report, Rule, rule_named

BLOCK = 1 << 17  # values; a MB of float64

dtype_name = lru_cache(str)  # NumPy computes the name anew each time

ruled = partial(
    option,
    values=f"{', '.join(RULES)}; before it nnm+",
    check=rule_named,
    like=[*RULES, *(f"nnm+{rule}" for rule in RULES)],
)

HAS_STATISTICS = Used("a method whose BatchNorm statistics the server combines", lambda config: config.build_method().has_statistics)
SHARES_WEIGHTS = Used("a method with which clients share weights", lambda config: config.build_method().shares(Role.WEIGHT))


def extremes(array: np.ndarray) -> tuple[float, float]:
    """Return smallest and largest value of a non-empty array; NaN if one is NaN."""
    if array.size <= BLOCK:
        return float(array.min()), float(array.max())
    flat = array.reshape(-1)  # block by block: the second look at a block finds it in the cache
    ends = np.array([extremes(flat[i : i + BLOCK]) for i in range(0, flat.size, BLOCK)])
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest finite absolute value of floating-point tensors; 0 without any."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return max((abs(end.item()) for tensor in floats for end in torch.aminmax(tensor)), default=0.0)


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether all values stay finite when they are stored in ``dtype``."""
    if not dtype.is_floating_point or not tensor.numel():
        return True
    blocks = tensor.reshape(-1).split(BLOCK)
    return all(math.isfinite(end.item()) for block in blocks for end in torch.aminmax(block.to(dtype)))


class WeightedSum:
    """Sum named tensors, each times its weight, in float64, in the order of ``add``.

    Large tensors are added block by block, without a float64 copy. ``total`` sums
    the weights.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._like: Named = {}
        self._whole = torch.empty(0)

    def add(self, part: Named, weight: float) -> None:
        """Add ``weight * part``. The first part gives the sum its names."""
        if not self._like:
            # Freed memory returns to the operating system at once if it is one large piece, not if many small ones.
            self._whole = torch.from_numpy(np.zeros(sum(tensor.numel() for tensor in part.values())))
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in part.items()}
        self.total += weight
        copy = torch.empty(BLOCK, dtype=torch.float64)
        for name, sums in self._pieces().items():
            for few, piece in zip(sums.split(BLOCK), part[name].reshape(-1).split(BLOCK), strict=True):
                few.add_(copy[: piece.numel()].copy_(piece), alpha=weight)

    def mean(self) -> dict[str, Tensor]:
        """Return the weighted mean by name, in the memory of the sum, which is over."""
        self._whole.div_(self.total)
        mean = {name: piece.view(self._like[name].shape) for name, piece in self._pieces().items()}
        self._whole = torch.empty(0)
        return mean

    def _pieces(self) -> dict[str, Tensor]:
        pieces = self._whole.split([tensor.numel() for tensor in self._like.values()])
        return dict(zip(self._like, pieces, strict=True))


def average(parts: Sequence[Named], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of the clients' tensors by name, in float64, in the given order."""
    mean = WeightedSum()
    for part, weight in zip(parts, weights, strict=True):
        mean.add(part, float(weight))
    return mean.mean()


def combine(
    rule: Callable[[LayerReports], Running],
    shared: Mapping[str, Running],
    reports: Sequence[Mapping[str, Moments]],
    steps: Sequence[float],
    defence: Defence | None = None,
    pace: float = 1.0,
    scales: Mapping[str, float] | None = None,
    least: int = 2,
) -> dict[str, Running]:
    """Combine the clients' moments into new shared statistics per layer, in float64.

    A layer with fewer than ``least`` values per channel in total keeps its
    statistics: one value has no variance. So does one that too few clients ran for
    the rule of ``defence``. ``pace`` is the round's learning rate
    over that of round 1, ``scales`` as in ``SharedModel``.
    """
    new = dict(shared)
    average = weighted_mean if defence is None else defence.average
    if defence is not None and defence.active:
        reports, steps = defence.believed(reports, steps)
    for name in shared:
        parts = [report[name] for report in reports if name in report]
        total = sum(part.count for part in parts)
        if total < least or (defence is not None and defence.too_few(sum(part.count > 0 for part in parts))):
            continue
        mean_steps = sum(report[name].count * step for report, step in zip(reports, steps, strict=True) if name in report) / total
        scale = (scales or {}).get(name, math.inf)
        new[name] = rule(LayerReports(shared[name], parts, mean_steps, pace, average, scale))
    return new


def difference(weight: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pseudo-gradient ``weight - mean`` of a tensor or block, in the memory of ``mean``.

    The average is first rounded to ``dtype``, that of the stored weights, so that
    an SGD step with learning rate 1 gives it bit for bit. Otherwise one value in 40
    could end at the next float32.
    """
    return torch.sub(weight, mean.copy_(mean.to(dtype)), out=mean)


@dataclass(frozen=True)
class Drift:
    """Describe how far one update moved the statistics.

    Attributes:
        largest: The largest change of a running mean, in standard deviations by the
            old statistics.
        layer: The layer with this change.
        min_var: The smallest new running variance.
        growth: The largest growth factor of a layer's mean running variance.
    """

    largest: float
    layer: str
    min_var: float
    growth: float

    @classmethod
    def between(cls, old: Mapping[str, Running], new: Mapping[str, Running], eps: float = 1e-5) -> Drift | None:
        """Compare two sets of statistics, ``eps`` added to variances; None if ``new`` is empty."""
        if not new:
            return None
        moved = {k: float(((new[k].mean - old[k].mean).abs() / (old[k].var + eps).sqrt()).max()) for k in new}
        growth = max(float(new[k].var.mean() / (old[k].var.mean() + eps)) for k in new)
        layer = max(moved, key=lambda k: (math.isnan(moved[k]), moved[k]))  # ``max`` could ignore a NaN
        return cls(moved[layer], layer, min(float(running.var.min()) for running in new.values()), growth)


def running_statistics(model: nn.Module, of: Collection[str] | None = None) -> dict[str, Running]:
    """Return layer -> a CPU copy of its running statistics, for layers ``of`` (None: all)."""
    return {
        name: Running(layer.running_mean.detach().cpu().clone(), layer.running_var.detach().cpu().clone())
        for name, layer in batch_norms(model).items()
        if (of is None or name in of) and layer.running_mean is not None and layer.running_var is not None
    }


@torch.no_grad()
def store_statistics(model: nn.Module, statistics: Mapping[str, Running]) -> None:
    """Set running statistics of layers of ``model``, in place."""
    for name, running in statistics.items():
        layer = model.get_submodule(name)
        layer.get_buffer("running_mean").copy_(running.mean)
        layer.get_buffer("running_var").copy_(running.var)


def rule_of(rule: str | Rule) -> Rule:
    """Return a rule, given by itself or by its name, as a function."""
    return rule if callable(rule) else rule_named(rule)


class TooFew(ValueError):
    """Report too few usable replies: for a round, or for a rule against ``f`` clients."""


@dataclass(frozen=True)
class Defence:
    """Describe the rules against ``f`` Byzantine clients: for BN statistics and for updates.

    An active defence replaces the numbers of samples, activations and steps that
    clients claim by the median client's, so that all clients have the same weight.

    Attributes:
        f: The number of Byzantine clients that the rules withstand, at least 0.
        statistics: The rule for BN statistics, or its name (``robust.rule_named``).
        updates: The rule for updates of the weights, or its name.

    Raises:
        ValueError: ``f`` is negative, or there is no rule of a given name.
    """

    f: int = option(
        0,
        "number of Byzantine clients that the rules withstand; -1: as many as a setup lets attack, else none",
        ">= -1",
        key="declared-byzantine",
        run=-1,
    )
    statistics: str | Rule = ruled("mean", "how the server combines the clients' BN statistics", key="statistics-rule", used=HAS_STATISTICS)
    updates: str | Rule = ruled("mean", "how the server combines the clients' updates", key="update-rule", used=SHARES_WEIGHTS)

    def __post_init__(self) -> None:
        if type(self.f) is not int or self.f < 0:
            raise ValueError(f"f, the number of Byzantine clients that the rules withstand, must be a whole number >= 0, but got {self.f}")
        rule_of(self.statistics), rule_of(self.updates)

    @property
    def active(self) -> bool:
        """Tell whether this differs from ``NO_DEFENCE``."""
        return self != NO_DEFENCE

    def among(self, n: int, refused: int) -> Defence:
        """Return the defence for ``n`` remaining replies, after ``refused`` wrong ones.

        Refused clients may be honest. So ``f`` falls only until ``n`` are enough,
        and by at most ``refused``.

        Raises:
            TooFew: They are not enough for both rules. The message has the smallest
                number.
        """
        problem = ""
        for f in range(self.f, max(0, self.f - refused) - 1, -1):
            problem = _problem(self.updates, n, f) or _problem(self.statistics, n, f)
            if not problem:
                return replace(self, f=f)
        raise TooFew(problem)

    def too_few(self, n: int) -> bool:
        """Tell whether the rule for statistics cannot withstand ``f`` of ``n`` clients that ran a layer."""
        return self.statistics != "mean" and bool(_problem(self.statistics, n, self.f))

    @property
    def average(self) -> Average:
        """Return the rule for statistics: a function of values (a row per client) and counts.

        In an exchange of FedTAN, where few clients run a layer, it withstands as
        many Byzantine ones as these rows allow.
        """
        if self.statistics == "mean":
            return _unweighted if self.active else weighted_mean
        return self._average

    def _average(self, values: Tensor, counts: Tensor) -> Tensor:
        f = next(f for f in range(self.f, -1, -1) if f == 0 or not _problem(self.statistics, len(values), f))
        if _problem(self.statistics, len(values), f):
            return _unweighted(values, counts)
        value: Tensor = rule_of(self.statistics)(values, f).value
        return value

    def update(self, parts: Sequence[Named], origin: Named | None) -> tuple[dict[str, Tensor], Report]:
        """Combine the clients' updates by ``updates``, in float64. Return its report, too.

        Updates are the differences of ``parts`` from ``origin``, the tensors that
        clients started from and that are added to the result, or ``parts``
        themselves without it.
        """
        sizes = {name: tensor.numel() for name, tensor in parts[0].items()}
        rows = torch.empty(len(parts), sum(sizes.values()), dtype=torch.float64)
        for row, part in zip(rows, parts, strict=True):
            for name, own in zip(sizes, row.split([*sizes.values()]), strict=True):
                own.copy_(part[name].reshape(-1))
                if origin is not None:
                    own.sub_(origin[name].double().reshape(-1))
        value, report = rule_of(self.updates)(rows, self.f)
        pieces = zip(sizes, value.split([*sizes.values()]), strict=True)
        combined = {name: piece.view(parts[0][name].shape) for name, piece in pieces}
        return {name: t if origin is None else origin[name].double() + t for name, t in combined.items()}, report

    def believed(self, reports: Sequence[Mapping[str, Moments]], steps: Sequence[float]) -> tuple[list[dict[str, Moments]], list[int]]:
        """Return ``reports`` and ``steps`` with the median client's counts and numbers of steps.

        Layers that a client did not run keep their count 0.
        """
        layers = {name for report in reports for name in report}
        usual = {name: int(median([r[name].count for r in reports if name in r and r[name].count > 0] or [0])) for name in layers}
        believed = [{k: replace(m, count=usual[k] if m.count > 0 else 0) for k, m in report.items()} for report in reports]
        return believed, [int(median(steps))] * len(steps)


NO_DEFENCE = Defence()


def _unweighted(values: Tensor, counts: Tensor) -> Tensor:
    return values.mean(0)


@lru_cache
def _problem(rule: str | Rule, n: int, f: int) -> str:
    """Return why ``rule`` cannot combine ``n`` rows, and the number it needs, if so."""
    if n == 0:
        return "there is no reply to combine"
    if _serves(rule, n, f):
        return ""
    least = next((m for m in range(n + 1, n + 8 * f + 16) if _serves(rule, m, f)), None)
    return f"{rule} withstands f={f} Byzantine clients among at least {least}, but got n={n}: take more clients or declare a smaller f"


def _serves(rule: str | Rule, n: int, f: int) -> bool:
    try:
        rule_of(rule)(np.zeros((n, 1)), f)
    except ValueError:
        return False
    return True
