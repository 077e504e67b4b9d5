"""Read the accuracy of all methods in several regimes (kinds of federations), and find the regime most like a given federation.

``python benchmarks/own_map_pages.py`` writes the file of the regimes, ``map.json``, from its runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.special import stdtrit  # type: ignore[import-untyped]

from fl_bn.advise.measure import Measured

FILE = Path(__file__).with_name("map.json")
BASELINE = "fedavg"  # plain BatchNorm
MOST, LEAST = 3, 2  # the largest and the smallest number of candidates
FAR = 5.0  # a third candidate is left out if it is more points than this behind the best
ONE_SEED = 10.0  # the difference in points that separates two methods where there is one seed
HALF_SHIFT = 0.1  # the feature shift, in nats per channel, that the scale from 0 (none) to 1 (infinite) places at 0.5
WEIGHTS = {"label skew": 2.0, "feature shift": 2.0, "batch size": 1.0, "participation": 1.0, "local steps": 1.0}
"""The weight of each axis in the distance between two regimes."""


@dataclass(frozen=True)
class Regime:
    """Hold one regime: a kind of federation, and how accurate each method was in it.

    Attributes:
        name: The name of the regime.
        problem: The regime in words.
        measured: The clients of the regime in numbers.
        accuracies: Method -> seed -> accuracy in percent after the last round.
        rates: Method -> the learning rate of its runs, which was best on validation samples.
    """

    name: str
    problem: str
    measured: Measured
    accuracies: Mapping[str, Mapping[int, float]]
    rates: Mapping[str, float]

    @property
    def methods(self) -> list[str]:
        """Return the methods that have a run, the best first. Equally good methods are in the order of ``map.json``."""
        return sorted((name for name, runs in self.accuracies.items() if runs), key=lambda name: -self.mean(name))

    @property
    def seeds(self) -> list[int]:
        """Return the seeds with which every method was run."""
        runs = [set(self.accuracies[name]) for name in self.methods]
        return sorted(set.intersection(*runs)) if runs else []

    def mean(self, method: str) -> float:
        """Return the mean accuracy of a method in percent. A run whose accuracy is not finite counts as 0."""
        return fmean(_finite(value) for value in self.accuracies[method].values())

    def above(self, method: str, other: str = BASELINE) -> float:
        """Return the accuracy of ``method`` minus that of ``other`` in points, over the seeds of both; NaN: they share no seed."""
        mine, theirs = (self.accuracies.get(name, {}) for name in (method, other))
        both = [_finite(mine[seed]) - _finite(theirs[seed]) for seed in mine if seed in theirs]
        return fmean(both) if both else math.nan

    @property
    def separable(self) -> float:
        """Return the smallest difference, in points, that separates two methods with 95 % confidence.

        It is Fisher's least significant difference, from an analysis of variance of methods and seeds, over the seeds
        that all methods have. With one seed or one method there is no estimate, so the value is ``ONE_SEED``.
        """
        methods, seeds = self.methods, self.seeds
        freedom = (len(methods) - 1) * (len(seeds) - 1)
        if min(len(methods), len(seeds)) < 2:
            return ONE_SEED
        values = {(name, seed): _finite(self.accuracies[name][seed]) for name, seed in product(methods, seeds)}
        whole = fmean(values.values())
        by_method = {name: fmean(values[name, seed] for seed in seeds) for name in methods}
        by_seed = {seed: fmean(values[name, seed] for name in methods) for seed in seeds}
        residual = sum((values[name, seed] - by_method[name] - by_seed[seed] + whole) ** 2 for name, seed in values)
        return float(stdtrit(freedom, 0.975)) * math.sqrt(2 * residual / freedom / len(seeds))

    def level(self, method: str) -> list[str]:
        """Return ``method`` and all methods whose accuracy does not differ significantly from that of ``method``."""
        others = [name for name in self.methods if name != method and abs(self.above(method, name)) < self.separable]
        return [method, *others]


@dataclass(frozen=True)
class Nearest:
    """Hold the regime that is most like a federation.

    Attributes:
        regime: The regime.
        apart: The distance between the regime and the federation on each axis. 1 is the distance between the two
            regimes that are farthest apart on that axis.
    """

    regime: Regime
    apart: Mapping[str, float]

    @property
    def farthest(self) -> str:
        """Return the axis on which regime and federation differ most; empty: the distance is at most 0.25 on every axis."""
        axis = max(self.apart, key=lambda name: self.apart[name])
        return axis if self.apart[axis] > 0.25 else ""


def load(file: Path = FILE) -> list[Regime]:
    """Read the regimes (kinds of federations, with the accuracy of each method) from ``map.json``."""
    return [
        Regime(
            entry["name"],
            entry["problem"],
            Measured(**entry["measured"]),
            {method: {int(seed): value for seed, value in runs.items()} for method, runs in entry["accuracies"].items()},
            entry["rates"],
        )
        for entry in json.loads(file.read_text(encoding="utf-8"))
    ]


def dump(regimes: Sequence[Regime]) -> str:
    """Return the text of ``map.json``, which ``load`` reads, for these regimes."""
    return json.dumps([asdict(regime) for regime in regimes], indent=1) + "\n"


def position(measured: Measured) -> dict[str, float]:
    """Return the numbers by which a federation is compared with the regimes: axis -> value.

    Label skew and feature shift are between 0 and 1; the other axes are logarithms to base 10.
    """
    return {
        "label skew": measured.label_skew,
        "feature shift": measured.shift / (measured.shift + HALF_SHIFT),
        "batch size": math.log10(measured.batch_size),
        "participation": math.log10(measured.participation),
        "local steps": math.log10(measured.local_steps),
    }


def nearest(measured: Measured, regimes: Sequence[Regime]) -> Nearest:
    """Find the regime whose position is nearest to that of a federation. If several are equally near, take the first."""
    here, there = position(measured), [position(regime.measured) for regime in regimes]
    lengths = {axis: max(at[axis] for at in there) - min(at[axis] for at in there) for axis in here}

    def apart(at: Mapping[str, float]) -> dict[str, float]:
        return {axis: abs(here[axis] - at[axis]) / (lengths[axis] or 1.0) for axis in here}

    distances = [Nearest(regime, apart(at)) for regime, at in zip(regimes, there, strict=True)]
    return min(distances, key=lambda one: sum((WEIGHTS[axis] * value) ** 2 for axis, value in one.apart.items()))


def candidates(regime: Regime, allowed: Collection[str]) -> list[str]:
    """Return the two or three best methods of a regime, the best first.

    Args:
        regime: The regime.
        allowed: The methods to choose from. The third method is left out if it is more than ``FAR`` points behind the best.
    """
    best = [name for name in regime.methods if name in allowed][:MOST]
    return [name for place, name in enumerate(best) if place < LEAST or regime.mean(best[0]) - regime.mean(name) <= FAR]


def why(regime: Regime, method: str) -> str:
    """Return a line of text with a method's accuracy in a regime, and its difference to plain BatchNorm."""
    accuracy = f"{regime.mean(method):.1f} %"
    above = regime.above(method)
    if method == BASELINE or math.isnan(above):
        return f"{accuracy}, plain BatchNorm" if method == BASELINE else accuracy
    apart = "" if abs(above) >= regime.separable else ", not significant"
    return f"{accuracy}, {above:+.1f} points to plain BatchNorm{apart}"


def verdict(regime: Regime) -> str:
    """Return a sentence that names the best methods in a regime, and says whether they are better than plain BatchNorm."""
    best = regime.level(regime.methods[0])
    if BASELINE in best:
        return "no method is significantly better than plain BatchNorm"
    if len(best) == 1:
        return f"{best[0]} is ahead of all others"
    return f"{best[0]} is ahead of plain BatchNorm, but not significantly ahead of {', '.join(best[1:])}"


def _finite(value: Any) -> float:
    return float(value) if value is not None and math.isfinite(value) else 0.0
