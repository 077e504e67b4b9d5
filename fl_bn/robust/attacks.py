"""Make the false rows of f Byzantine clients that know the honest ones.

An ``Attack`` takes the honest rows (h, d) and f, and returns rows (f, d). A row is
a client's update, or its statistics of a layer. ``label-flip`` changes the training
data instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fl_bn.support.names import check_name

Attack = Callable[[np.ndarray, int], np.ndarray]
Damage = Callable[[np.ndarray], float]
"""``row (d,) -> float``: the error of the server's result if Byzantine clients send ``row``."""

GRID = np.geomspace(0.1, 20.0, 12)  # strengths that an optimised attack tries, each with both signs


def sign_flip(honest: np.ndarray, f: int) -> np.ndarray:
    """Return f copies of the negative honest mean."""
    return _copies(-honest.mean(0), f)


def foe(epsilon: float) -> Attack:
    """Make the attack "Fall of empires": the honest mean times ``-epsilon``.

    References:
        Xie et al., Fall of Empires, UAI 2019.
    """
    return lambda honest, f: _copies(-epsilon * honest.mean(0), f)


def alie(z: float | None = None) -> Attack:
    """Make "A little is enough": the honest mean minus ``z`` honest standard deviations.

    ``z`` None: the paper's ``z_max``.

    References:
        Baruch et al., A Little Is Enough, NeurIPS 2019.
    """

    def attack(honest: np.ndarray, f: int) -> np.ndarray:
        strength = z_max(len(honest) + f, f) if z is None else z
        return _copies(honest.mean(0) - strength * honest.std(0), f)

    return attack


def z_max(n: int, f: int) -> float:
    """Return ``z`` of ALIE: the most standard deviations with which f of n rows stay hidden.

    With s = floor(n/2 + 1) - f, ``z`` is the normal quantile at (n - f - s) / (n -
    f), at least 0. Together with s honest rows farther from the mean, the f
    Byzantine rows are a majority (ALIE, algorithm 3).
    """
    s = n // 2 + 1 - f
    share = (n - f - s) / (n - f)
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def mimic(victim: int = 0) -> Attack:
    """Make the attack that repeats honest row ``victim``, from 0.

    References:
        Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via
        Bucketing, ICLR 2022.
    """
    return lambda honest, f: _copies(honest[victim % len(honest)], f)


def optimised(family: Callable[[float], Attack], damage: Damage, grid: np.ndarray = GRID) -> Attack:
    """Make a family's attack with the strength that does the most damage.

    It tries every strength of ``grid``, positive and negative, because a rule may
    be weak on either side, then strengths between the best one and its neighbours.
    Shejwalkar and Houmansadr (NDSS 2021) and ByzFL try positive ones only.

    Args:
        family: makes an attack from a strength, whose rows are equal and linear in
            it (FOE, ALIE).
        damage: the error of the server's aggregate if all Byzantine clients send a
            row.
        grid: strengths > 0, a geometric series.
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


def _copies(row: np.ndarray, f: int) -> np.ndarray:
    return np.repeat(row[None], f, axis=0)


ON = ("statistics", "updates", "both")
LABEL_FLIP = "label-flip"
ATTACKS: dict[str, Callable[[float], Attack] | None] = {
    "sign-flip": lambda strength: sign_flip,
    "foe": lambda strength: foe(strength or 0.5),
    "alie": lambda strength: alie(strength or None),
    "mimic": lambda strength: mimic(int(strength)),
    "nan": lambda strength: lambda honest, f: np.full((f, honest.shape[1]), np.nan),
    LABEL_FLIP: None,
    "foe-optimised": foe,
    "alie-optimised": alie,
}


@dataclass(frozen=True)
class Adversary:
    """Describe the Byzantine clients, the last ``f`` of the population, and their attack.

    Attributes:
        attack: a name of ``ATTACKS``, or a function ``(honest rows, f) -> rows``.
        on: what is false in their replies: ``statistics``, ``updates`` or ``both``.
        strength: FOE's epsilon, ALIE's z or mimic's victim. 0: the default, .5 for
            FOE, ``z_max`` for ALIE.

    Raises:
        ValueError: a value is out of range.
    """

    attack: str | Attack
    f: int
    on: str = "both"
    strength: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.attack, str):
            check_name("attack", self.attack, ATTACKS)
        if self.f < 1:
            raise ValueError(f"an attack needs at least one Byzantine client, but got f={self.f}")
        check_name("an attack's target (on)", self.on, ON)

    def rows(self, honest: np.ndarray, f: int, damage: Damage) -> np.ndarray:
        """Return the Byzantine rows (f, d), from the honest ones (h, d).

        An optimised attack maximises ``damage``, a function of one row.
        """
        if not isinstance(self.attack, str):
            return self.attack(honest, f)
        family = ATTACKS[self.attack]
        assert family is not None  # label flipping changes the training data, not what clients send
        if self.attack.endswith("-optimised"):
            return optimised(family, damage)(honest, f)
        return family(self.strength)(honest, f)

    def statistics_rows(self, honest: np.ndarray, f: int, damage: Damage) -> np.ndarray:
        """Return the false statistics of one layer, as ``rows`` does.

        A row holds C means, then C variances. Sign flipping changes only means
        (FBN, section 5).
        """
        rows = self.rows(honest, f, damage)
        if self.attack == "sign-flip":
            half = honest.shape[1] // 2
            rows[:, half:] = honest[:, half:].mean(0)
        return rows
