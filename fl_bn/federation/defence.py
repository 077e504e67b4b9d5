"""How the server combines what clients send when some of them may lie: which rules, against how many, and what it no longer believes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median, median_high

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.moments import Average, Moments, Running, weighted_mean
from fl_bn.robust import Report, Rule, rule_named

Named = Mapping[str, Tensor]
Layers = Mapping[str, _BatchNorm]
TOLERANCE = 0.01  # of float32 rounding, relative


def _rule(rule: str | Rule) -> Rule:
    return rule_named(rule) if isinstance(rule, str) else rule


class TooFew(ValueError):
    """Fewer replies than a rule needs against so many Byzantine clients."""


@dataclass(frozen=True)
class Defence:
    """Against ``f`` Byzantine clients: a rule for their BN statistics and one for their updates, named (``robust.rule_named``) or as it is.

    An active defence believes no count that a client claims: samples, activations and steps are those of the median client, so that
    everyone weighs alike.
    """

    f: int = 0
    statistics: str | Rule = "mean"
    updates: str | Rule = "mean"

    def __post_init__(self) -> None:
        if self.f < 0:
            raise ValueError(f"f must be a number of clients >= 0, but got {self.f}")
        _rule(self.statistics), _rule(self.updates)

    @property
    def active(self) -> bool:
        return self != NO_DEFENCE

    def check(self, n: int) -> None:
        """Raises TooFew where ``n`` replies are fewer than a rule needs; the message says the smallest number."""
        for rule in (self.updates, self.statistics):
            if problem := _problem(rule, n, self.f):
                raise TooFew(problem)

    def without(self, refused: int, n: int) -> Defence:
        """Return the defence of the ``n`` replies that are left when ``refused`` were left out for what they hold.

        A client that is refused may be honest (its training diverged, say), and then all Byzantine ones are still there: ``f`` stays as
        it is wherever the rules can do with it. Only where ``n`` is too small for it is ``f`` lowered, and by no more than ``refused``.
        """
        least = max(0, self.f - refused)
        fits = (replace(self, f=f) for f in range(self.f, least, -1))
        return next((defence for defence in fits if defence.serves(n)), replace(self, f=least))

    def serves(self, n: int) -> bool:
        """Tell whether ``n`` replies are enough for both rules."""
        return not any(_problem(rule, n, self.f) for rule in (self.updates, self.statistics))

    @property
    def update_rule(self) -> Rule:
        return _rule(self.updates)

    @property
    def average(self) -> Average:
        """The rule for statistics. Of fewer rows than it needs (a layer that few clients ran) it withstands as many as it can."""
        if self.statistics == "mean":
            return _unweighted if self.active else weighted_mean
        return self._average

    def _average(self, values: Tensor, counts: Tensor) -> Tensor:
        f = next(f for f in range(self.f, -1, -1) if f == 0 or not _problem(self.statistics, len(values), f))
        if _problem(self.statistics, len(values), f):
            return _unweighted(values, counts)
        value: Tensor = _rule(self.statistics)(values, f).value
        return value

    def update(self, parts: Sequence[Named], origin: Named | None) -> tuple[dict[str, Tensor], Report]:
        """``origin`` + the rule of the ``parts``' differences from it (origin None: of the parts alone), in float64, and its report."""
        rows = [{k: t.double() - (0.0 if origin is None else origin[k].double()) for k, t in part.items()} for part in parts]
        value, report = self.update_rule(rows, self.f)
        return {k: t if origin is None else origin[k].double() + t for k, t in value.items()}, report

    def believed(self, reports: Sequence[Mapping[str, Moments]], steps: Sequence[int]) -> tuple[list[dict[str, Moments]], list[int]]:
        """The reports with the counts, and the steps, of the median client."""
        layers = {name for report in reports for name in report}
        usual = {name: int(median([r[name].count for r in reports if name in r and r[name].count > 0] or [0])) for name in layers}
        believed = [{k: replace(m, count=usual[k] if m.count > 0 else 0) for k, m in report.items()} for report in reports]
        return believed, [int(median(steps))] * len(steps)


NO_DEFENCE = Defence()


def _unweighted(values: Tensor, counts: Tensor) -> Tensor:
    return values.mean(0)


@lru_cache
def _problem(rule: str | Rule, n: int, f: int) -> str:
    """Why ``rule`` cannot do with n rows, and how many it needs; empty if they are enough."""
    if n == 0:
        return "there is no reply to combine"
    if _serves(rule, n, f):
        return ""
    least = next((m for m in range(n + 1, n + 8 * f + 16) if _serves(rule, m, f)), None)
    return f"{rule} withstands f={f} Byzantine rows among at least {least}, but got n={n}: send more rows or declare a smaller f"


def _serves(rule: str | Rule, n: int, f: int) -> bool:
    try:
        _rule(rule)(np.zeros((n, 1)), f)
    except ValueError:
        return False
    return True


def variance_floor(shared: Tensor, momentum: float, steps: int) -> Tensor:
    """The least running variance that ``steps`` batches can leave, in float64; 0 where its own precision has no number so small."""
    floor = (1 - momentum) ** steps * shared.double()
    return floor.where(floor > torch.finfo(shared.dtype).tiny, torch.zeros_like(floor))


def _below(shared: Running, report: Running, momentum: float, steps: int) -> tuple[Tensor, Tensor]:
    """The smallest variances that honest training leaves after so many steps, and which channels' are smaller."""
    floor = (1 - TOLERANCE) * variance_floor(shared.var, momentum, steps)
    return floor, report.var.double() < floor


def looks_low(shared: Mapping[str, Running], report: Mapping[str, Running], steps: int, layers: Layers) -> bool:
    """Whether ``undercut`` may refuse a report that counts one update per step; it decides when all reports are there."""
    judged = ((shared[name], report[name], layer.momentum) for name, layer in layers.items() if name in shared and name in report)
    return any(bool(_below(old, new, b, steps)[1].any()) for old, new, b in judged if b is not None)


def undercut(
    shared: Mapping[str, Running],
    reports: Sequence[Mapping[str, Running]],
    steps: Sequence[int],
    layers: Layers,
    updates: Sequence[Mapping[str, int]] = (),
) -> dict[int, str]:
    """Reports with a running variance below what honest training can leave, by position, with the reason.

    Each update moves a running variance to (1 - b) of itself plus b times something that is not negative: (1 - b)^k of the shared one is
    the floor after k of them. ``updates``: how many each report counts per layer, where that is not one per step (a layer that is used
    several times, a loop that accumulates gradients); what is believed is the median client's per step, and less than one step's more: a
    loop may end between two steps. If most clients are below the floor, there is no telling.
    """
    found: dict[int, str] = {}
    for name, layer in layers.items():
        if name not in shared or layer.momentum is None:
            continue
        low: dict[int, str] = {}
        calls = median_high([u.get(name, k) / k for u, k in zip(updates, steps, strict=True) if k] or [1]) if updates else 1
        moves = "steps" if calls == 1 else "updates"
        for i, (report, k) in enumerate(zip(reports, steps, strict=True)):
            if name not in report:
                continue
            usual, claimed = k * calls, updates[i].get(name, k) if updates else k
            k = math.ceil(claimed if usual < claimed < usual + calls else usual)
            floor, below = _below(shared[name], report[name], layer.momentum, k)
            if bool(below.any()):
                c = int(torch.argmax((floor - report[name].var).where(below, torch.zeros_like(floor))))
                low[i] = (
                    f"statistics/{name}.running_var: channel {c} is {float(report[name].var[c]):.3g} after {k} {moves} from "
                    f"{float(shared[name].var[c]):.3g}: honest training leaves at least {float(floor[c]):.3g}"
                )
        if 2 * len(low) < len(reports):
            found |= {i: reason for i, reason in low.items() if i not in found}
    return found
