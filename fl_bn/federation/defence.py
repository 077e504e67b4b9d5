"""How the server combines what clients send when some of them may lie: which rules, against how many, and what it no longer believes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median

import numpy as np
from torch import Tensor

from fl_bn.moments import Average, Moments, weighted_mean
from fl_bn.options import option, parses
from fl_bn.robust import PREAGGREGATIONS, RULES, Report, Rule, rule_named

Named = Mapping[str, Tensor]


ruled = partial(
    option,
    values=f"{', '.join(RULES)}; before it {' or '.join(f'{name}+' for name in PREAGGREGATIONS)}",
    check=parses(rule_named),
    like=[*RULES, *(f"{before}+{rule}" for before in PREAGGREGATIONS for rule in RULES)],
)


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

    f: int = option(0, "Byzantine clients that the rules withstand; -1: byzantine", ">= -1", key="declared-byzantine", run=-1)
    statistics: str | Rule = ruled("mean", "how the server combines the clients' BN statistics", key="statistics-rule")
    updates: str | Rule = ruled("mean", "how it combines their updates", key="update-rule")

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
