"""Combine the clients' replies when some clients may be Byzantine (send false values)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from fl_bn.bn.moments import Average, Moments, weighted_mean
from fl_bn.bn.roles import Role
from fl_bn.federation.values import Named
from fl_bn.options import Used, option
from fl_bn.robust import PREAGGREGATIONS, RULES, Report, Rule, rule_named

ruled = partial(
    option,
    values=f"{', '.join(RULES)}; before it {' or '.join(f'{name}+' for name in PREAGGREGATIONS)}",
    check=rule_named,
    like=[*RULES, *(f"{before}+{rule}" for before in PREAGGREGATIONS for rule in RULES)],
)

HAS_STATISTICS = Used("a method whose BatchNorm statistics the server combines", lambda config: config.build_method().has_statistics)
SHARES_WEIGHTS = Used("a method with which clients share weights", lambda config: config.build_method().shares(Role.WEIGHT))


def _rule(rule: str | Rule) -> Rule:
    return rule_named(rule) if isinstance(rule, str) else rule


class TooFew(ValueError):
    """Report too few usable replies: for a round, or for a rule against ``f`` clients."""


@dataclass(frozen=True)
class Defence:
    """Describe the rules against ``f`` Byzantine clients: for BN statistics and for updates.

    An active defence replaces the numbers of samples, activations and steps that clients claim by the median
    client's, so that all clients have the same weight.

    Attributes:
        f: The number of Byzantine clients that the rules withstand, at least 0.
        statistics: The rule that combines BN statistics: a name (``robust.rule_named``) or the rule itself.
        updates: The rule that combines updates of the weights: a name or the rule itself.

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
        if self.f < 0:
            raise ValueError(f"f, the number of Byzantine clients that the rules withstand, must be >= 0, but got {self.f}")
        _rule(self.statistics), _rule(self.updates)

    @property
    def active(self) -> bool:
        """Tell whether this differs from ``NO_DEFENCE``: plain averages with ``f`` = 0."""
        return self != NO_DEFENCE

    def check(self, n: int) -> None:
        """Raise TooFew, with the smallest number, unless ``n`` replies suffice for both rules."""
        for rule in (self.updates, self.statistics):
            if problem := _problem(rule, n, self.f):
                raise TooFew(problem)

    def among(self, n: int, refused: int) -> Defence:
        """Return the defence for ``n`` replies, see ``without``. Raise TooFew if they do not suffice."""
        fitting = self.without(refused, n)
        fitting.check(n)
        return fitting

    def without(self, refused: int, n: int) -> Defence:
        """Return the defence for ``n`` remaining replies, after some were refused for their contents.

        A refused client may be honest, and all Byzantine ones may remain. So ``f`` falls only until ``n`` replies are
        enough, and by at most ``refused``.
        """
        least = max(0, self.f - refused)
        fits = (replace(self, f=f) for f in range(self.f, least, -1))
        return next((defence for defence in fits if defence.serves(n)), replace(self, f=least))

    def serves(self, n: int) -> bool:
        """Tell whether ``n`` replies are enough for both rules."""
        return not any(_problem(rule, n, self.f) for rule in (self.updates, self.statistics))

    @property
    def update_rule(self) -> Rule:
        """Return the rule for updates as a function, even if ``updates`` is a name."""
        return _rule(self.updates)

    @property
    def average(self) -> Average:
        """Return the rule for statistics: a function of values (a row per client) and counts.

        If few clients ran a layer, the rule withstands as many Byzantine clients as these rows allow.
        """
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
        """Combine the clients' updates by ``update_rule``, in float64, and return the rule's report, too.

        Args:
            parts: The tensors of each client, by name.
            origin: The tensors that the clients started from. The rule combines the differences from them,
                and ``origin`` is added to the result. None: the rule combines ``parts`` themselves.
        """
        sizes = {name: tensor.numel() for name, tensor in parts[0].items()}
        rows = torch.empty(len(parts), sum(sizes.values()), dtype=torch.float64)
        for row, part in zip(rows, parts, strict=True):
            for name, own in zip(sizes, row.split([*sizes.values()]), strict=True):
                own.copy_(part[name].reshape(-1))
                if origin is not None:
                    own.sub_(origin[name].double().reshape(-1))
        value, report = self.update_rule(rows, self.f)
        pieces = zip(sizes, value.split([*sizes.values()]), strict=True)
        combined = {name: piece.view(parts[0][name].shape) for name, piece in pieces}
        return {name: t if origin is None else origin[name].double() + t for name, t in combined.items()}, report

    def believed(self, reports: Sequence[Mapping[str, Moments]], steps: Sequence[int]) -> tuple[list[dict[str, Moments]], list[int]]:
        """Return ``reports`` and ``steps`` with the median client's counts and numbers of steps.

        A layer that a client did not run (count 0) keeps its count 0.
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
    """Return why ``rule`` cannot combine ``n`` rows, and the number it needs; empty if it can."""
    if n == 0:
        return "there is no reply to combine"
    if _serves(rule, n, f):
        return ""
    least = next((m for m in range(n + 1, n + 8 * f + 16) if _serves(rule, m, f)), None)
    return f"{rule} withstands f={f} Byzantine clients among at least {least}, but got n={n}: take more clients or declare a smaller f"


def _serves(rule: str | Rule, n: int, f: int) -> bool:
    try:
        _rule(rule)(np.zeros((n, 1)), f)
    except ValueError:
        return False
    return True
