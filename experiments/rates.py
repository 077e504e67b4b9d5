"""Compare the learning rate of a claim's runs with other rates, on samples held out of the training data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from experiments.evidence import Runs
from fl_bn.app.report.settings import SEED, label

AXIS = "rate"  # the axis of the learning rates in the variant that tries them


@dataclass(frozen=True)
class Tried:
    """Hold the accuracies of one method at several learning rates.

    Attributes:
        name: The method, and its values on other axes.
        accuracies: Rate -> the accuracies in percent, one for each seed whose run stayed finite.
        claimed: The learning rate of the claim's runs; NaN if these runs have different rates.
    """

    name: str
    accuracies: Mapping[float, Sequence[float]]
    claimed: float

    @property
    def best(self) -> float:
        """Return the rate with the highest mean accuracy."""
        return max(self.accuracies, key=self.mean)

    @property
    def lost(self) -> float:
        """Return by how many points the best rate's accuracy exceeds that of the claim's rate; NaN if the latter was not tried."""
        return self.mean(self.best) - self.mean(self.claimed) if self.claimed in self.accuracies else math.nan

    def mean(self, rate: float) -> float:
        """Return the mean accuracy in percent at ``rate``; minus infinity if no run stayed finite."""
        return fmean(self.accuracies[rate]) if self.accuracies[rate] else -math.inf

    def shown(self, rate: float) -> str:
        """Format mean and standard deviation over seeds at ``rate``, such as ``81.3 (0.4)``; the best rate in bold.

        One seed has no deviation. Without accuracies, the text is ``not run`` or ``not finite``.
        """
        values = self.accuracies.get(rate)
        if not values:
            return "not run" if values is None else "not finite"
        mean = f"{self.mean(rate):.1f}"
        return (f"**{mean}**" if rate == self.best else mean) + (f" ({stdev(values):.1f})" if len(values) > 1 else "")


def tried(claim: Runs, rates: Runs) -> list[Tried]:
    """Return for every method its accuracies at the tried rates, and the rate of the claim's runs.

    Args:
        claim: The runs of the claim. The claim's rate is the rate of its runs with the same method and the same values on
            the other axes. Without such runs, it is the rate of all its runs with the same method.
        rates: The runs at several learning rates.
    """
    if rates.report is None:
        return []
    layout, methods = rates.report.layout, []
    shown = [axis for axis in (layout.row_axis, *layout.rest) if axis != AXIS]
    for values, cells in layout.by(shown).items():
        accuracies: dict[float, list[float]] = {}
        for cell in cells:
            finite = [point[1] for point in [cell.measurement(cell.metric)] if point and math.isfinite(point[1])]
            accuracies.setdefault(float(cell.config["learning-rate"]), []).extend(finite)
        place = {axis: cells[0].at(axis) for axis in cells[0].axes if axis not in (SEED, AXIS)}
        there = _rates(claim, place) or _rates(claim, {layout.row_axis: place[layout.row_axis]})
        methods.append(Tried(", ".join(values), accuracies, there.pop() if len(there) == 1 else math.nan))
    return methods


def in_words(methods: Sequence[Tried]) -> str:
    """Return a text that tells for which methods the claim's rate was the best, and how much better other rates were."""
    best = [one.name for one in methods if one.lost == 0]
    worse = [f"{one.name} ({one.best:g}, by {one.lost:.1f})" for one in methods if one.lost > 0]
    unknown = [f"{one.name} ({one.best:g})" for one in methods if math.isnan(one.lost)]
    parts = [f"the claim's rate is the best that was tried for {', '.join(best)}"] if best else []
    parts += [f"another was better, by so many points, for {', '.join(worse)}"] if worse else []
    parts += [f"the claim's was not tried, and this is the best of the others, for {', '.join(unknown)}"] if unknown else []
    return "; ".join(parts)


def _rates(runs: Runs, place: Mapping[str, str]) -> set[float]:
    """Return the learning rates of the runs whose values on their axes are those in ``place``."""
    alike = [cell for cell in runs.defined if all(label(cell.axes[axis]) == of for axis, of in place.items() if axis in cell.axes)]
    return {cell.config.learning_rate for cell in alike}
