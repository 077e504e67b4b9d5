"""Read the map, the accuracy of all methods in several regimes, and find the regime most like a federation.

``python benchmarks/own_map_pages.py`` writes the regimes' file, ``map.json``, from
its runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from fl_bn.app.advise.measure import Measured

FILE = Path(__file__).with_name("map.json")
BASELINE = "fedavg"  # plain BatchNorm
MATTERS = 2.0  # points; nobody should choose a method for less
HALF_SHIFT = 0.1  # the feature shift, in nats per channel, that the scale from 0 (none) to 1 (infinite) places at 0.5
WEIGHTS = np.array([2.0, 2.0, 1.0, 1.0, 1.0])  # of label skew, feature shift, batch size, participation, local steps


@dataclass(frozen=True)
class Regime:
    """Hold one regime: a kind of federation, and how accurate each method was in it.

    Attributes:
        problem: The regime in words.
        accuracies: Method -> seed -> accuracy in percent after the last round.
        rates: Method -> the learning rate of its runs, the best on validation
            samples.
        margins: Method -> half of the width of the 95 % confidence interval of its
            difference to plain BatchNorm, in points.
    """

    name: str
    problem: str
    measured: Measured
    accuracies: Mapping[str, Mapping[int, float]]
    rates: Mapping[str, float]
    margins: Mapping[str, float]

    @property
    def methods(self) -> list[str]:
        """Return the methods that have a run, the best first."""
        return sorted((name for name, runs in self.accuracies.items() if runs), key=lambda name: -self.mean(name))

    def mean(self, method: str) -> float:
        """Return a method's mean accuracy in percent. A run whose training diverged counts as 0."""
        return fmean(self.accuracies[method].values())

    def above(self, method: str, other: str = BASELINE) -> float:
        """Return the difference of two methods' mean accuracies in points."""
        return self.mean(method) - self.mean(other)

    def gain(self, method: str) -> str:
        """Return a method's difference to plain BatchNorm with its interval, and whether that may be chance or hardly matters."""
        if method == BASELINE:
            return "plain BatchNorm"
        above, margin = self.above(method), self.margins[method]
        said = f"{above:+.1f} ({above - margin:+.1f} to {above + margin:+.1f})"
        if abs(above) + margin < MATTERS:
            return f"{said}, less than {MATTERS:g} points"
        return f"{said}, may be chance" if abs(above) <= margin else said


def load(file: Path = FILE) -> list[Regime]:
    """Read the regimes from ``map.json``."""
    regimes = []
    for entry in json.loads(file.read_text(encoding="utf-8")):
        by_seed = {method: {int(seed): value for seed, value in runs.items()} for method, runs in entry["accuracies"].items()}
        regimes.append(Regime(**{**entry, "measured": Measured(**entry["measured"]), "accuracies": by_seed}))
    return regimes


def dump(regimes: Sequence[Regime]) -> str:
    """Return the text of ``map.json`` for these regimes."""
    return json.dumps([asdict(regime) for regime in regimes], indent=1) + "\n"


def position(measured: Measured) -> NDArray[np.float64]:
    """Return the five numbers by which federations are compared, in the order of ``WEIGHTS``.

    Label skew and feature shift are between 0 and 1; the others are logarithms to
    base 10.
    """
    lengths = np.log10([measured.batch_size, measured.participation, measured.local_steps])
    return np.array([measured.label_skew, measured.shift / (measured.shift + HALF_SHIFT), *lengths])


def nearest(measured: Measured, regimes: Sequence[Regime]) -> Regime:
    """Return the regime nearest to a federation, of several the first.

    A distance of 1 on an axis is that between the two regimes that are farthest
    apart on it.
    """
    there = np.array([position(regime.measured) for regime in regimes])
    span = np.ptp(there, axis=0)
    apart = WEIGHTS * (position(measured) - there) / np.where(span > 0, span, 1.0)
    return regimes[int(np.square(apart).sum(1).argmin())]
