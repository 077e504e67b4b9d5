"""Attacks: what f Byzantine clients send that know what the honest ones do.

An ``Attack`` maps the honest rows (h, d) and f to f rows (f, d). What the rows are is the caller's affair: updates, or one layer's
statistics. Label flipping is an attack on the training data and has a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np
import torch

from fl_bn.support.names import check_name, expected

Attack = Callable[[np.ndarray, int], np.ndarray]
Damage = Callable[[np.ndarray], float]
"""``row (d,) -> float``: how far the server is led astray if every Byzantine client sends ``row``."""

T = TypeVar("T", np.ndarray, torch.Tensor)

GRID = np.geomspace(0.1, 20.0, 12)  # strengths that an optimised attack tries, with either sign


def sign_flip(honest: np.ndarray, f: int) -> np.ndarray:
    """Send the honest mean, negated."""
    return _copies(-honest.mean(0), f)


def foe(epsilon: float = 0.5) -> Attack:
    """Make "Fall of empires" (inner product manipulation): the honest mean times ``-epsilon``. Xie et al., UAI 2019."""
    return lambda honest, f: _copies(-epsilon * honest.mean(0), f)


def alie(z: float | None = None) -> Attack:
    """Make "A little is enough": the honest mean minus ``z`` honest standard deviations, per coordinate.

    Baruch et al., NeurIPS 2019.

    Args:
        z: the number of standard deviations; None: the paper's ``z_max``.
    """

    def attack(honest: np.ndarray, f: int) -> np.ndarray:
        strength = z_max(len(honest) + f, f) if z is None else z
        return _copies(honest.mean(0) - strength * honest.std(0), f)

    return attack


def z_max(n: int, f: int) -> float:
    """Return the largest z at which ALIE hides: with s = floor(n/2 + 1) - f honest rows farther out, f and those s are a majority.

    The quantile of the normal distribution at (n - f - s) / (n - f), as in ALIE's algorithm 3, not below 0.
    """
    s = n // 2 + 1 - f
    share = (n - f - s) / (n - f)
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def mimic(victim: int = 0) -> Attack:
    """Make the attack that repeats the row of honest client ``victim``. Karimireddy et al., ICLR 2022."""
    return lambda honest, f: _copies(honest[victim % len(honest)], f)


def gaussian(sigma: float = 1.0, seed: int = 0) -> Attack:
    """Make independent noise of standard deviation ``sigma`` about zero, in every coordinate."""
    return lambda honest, f: np.random.default_rng(seed).normal(0.0, sigma, (f, honest.shape[1]))


def constant(value: float) -> Attack:
    """Make rows of one number: Inf, NaN, or any other."""
    return lambda honest, f: np.full((f, honest.shape[1]), value)


def optimised(family: Callable[[float], Attack], damage: Damage, grid: np.ndarray = GRID) -> Attack:
    """Make the attack of a family that does the most damage.

    Strengths are those of ``grid`` and of its negative, so that it need not be known on which side a rule is weak; the best is
    refined between its neighbours. Shejwalkar and Houmansadr (NDSS 2021) and ByzFL search on one side only.

    Args:
        family: strength -> attack, whose rows are alike and affine in the strength (FOE, ALIE).
        damage: of a row that every Byzantine client sends.
        grid: strengths > 0, in a geometric series.
    """

    def attack(honest: np.ndarray, f: int) -> np.ndarray:
        start = family(0.0)(honest, 1)[0]
        slope = family(1.0)(honest, 1)[0] - start

        def done(strength: float) -> float:
            value = damage(start + strength * slope)
            return value if np.isfinite(value) else -1.0

        tried = {float(s): done(float(s)) for s in (*-grid[::-1], *grid)}
        best = max(tried, key=tried.__getitem__)
        factors = (grid[1] / grid[0]) ** np.array([-0.75, -0.5, -0.25, 0.25, 0.5, 0.75])
        tried |= {float(best * k): done(float(best * k)) for k in factors}
        return _copies(start + max(tried, key=tried.__getitem__) * slope, f)

    return attack


def flip_labels(labels: T, classes: int) -> T:
    """Replace every label y of 0 .. classes - 1 by classes - 1 - y."""
    return classes - 1 - labels


def _copies(row: np.ndarray, f: int) -> np.ndarray:
    return np.repeat(row[None], f, axis=0)


ON = ("statistics", "updates", "both")
LABEL_FLIP = "label-flip"
ATTACKS: dict[str, Callable[[float], Attack] | None] = {
    "sign-flip": lambda strength: sign_flip,
    "foe": foe,
    "alie": lambda strength: alie(strength or None),
    "mimic": lambda strength: mimic(int(strength)),
    "gaussian": gaussian,
    "inf": lambda strength: constant(np.inf),
    "nan": lambda strength: constant(np.nan),
    LABEL_FLIP: None,
    "foe-optimised": foe,
    "alie-optimised": alie,
}
STRENGTHS = ("foe", "alie", "mimic", "gaussian")  # attacks that take one
STRENGTH = {"foe": 0.5, "gaussian": 1.0}  # where none is given; alie's is z_max


@dataclass(frozen=True)
class Adversary:
    """Hold the attack of the Byzantine clients, which are the last of the population.

    Attributes:
        attack: a name of ``ATTACKS``, or an attack of one's own.
        f: the number of Byzantine clients.
        on: what they lie about: ``statistics``, ``updates`` or ``both``.
        strength: FOE's epsilon, ALIE's z, the noise's standard deviation, mimic's victim; 0: the attack's own default.
    """

    attack: str | Attack
    f: int
    on: str = "both"
    strength: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.attack, str) and self.attack not in ATTACKS:
            raise ValueError(expected("attack", self.attack, ATTACKS, ", or a function"))
        if self.f < 1:
            raise ValueError(f"an attack needs at least one Byzantine client, but got f={self.f}")
        check_name("what an attack is on", self.on, ON)

    @property
    def flips_labels(self) -> bool:
        """Tell whether the attack is honest training on flipped labels."""
        return self.attack == LABEL_FLIP

    def rows(self, honest: np.ndarray, f: int, damage: Damage) -> np.ndarray:
        """Return the rows of the Byzantine clients.

        Args:
            honest: (h, d), the rows of the honest clients.
            f: how many rows to make.
            damage: the measure that an optimised attack maximises.

        Returns:
            (f, d).

        Raises:
            ValueError: the attack is on the data.
        """
        if not isinstance(self.attack, str):
            return self.attack(honest, f)
        family = ATTACKS[self.attack]
        if family is None:
            raise ValueError(f"{self.attack} is an attack on the data")
        if self.attack.endswith("-optimised"):
            return optimised(family, damage)(honest, f)
        return family(self.strength or STRENGTH.get(self.attack, 0.0))(honest, f)

    def statistics_rows(self, honest: np.ndarray, f: int, damage: Damage) -> np.ndarray:
        """Return the Byzantine clients' statistics of one layer, as ``rows`` does for (h, 2C): means, then variances.

        Sign flipping leaves the variances (FBN, section 5).
        """
        rows = self.rows(honest, f, damage)
        if self.attack == "sign-flip":
            half = honest.shape[1] // 2
            rows[:, half:] = honest[:, half:].mean(0)
        return rows
