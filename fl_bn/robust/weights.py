"""Weights that clients claim, made harmless."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def capped(weights: Sequence[float] | np.ndarray, f: int) -> np.ndarray:
    """(n,): ``weights`` cut off at the largest common cap under which the ``f`` heaviest hold less than half of the total; their sum is 1.

    The share left to them is at most (n - 1) / 2n: what the largest minority of equal clients has.

    Raises:
        ValueError: a weight is negative or not finite, all are zero, or f is not below n / 2.
    """
    w: np.ndarray = np.array(weights, dtype=np.float64)
    n = len(w)
    if not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError(f"weights must be finite, not negative and not all zero, but got {w.tolist()}")
    if not 0 <= 2 * f < n:
        raise ValueError(f"a cap against f={f} needs at least {2 * f + 1} weights, but got {n}")
    w /= w.max()
    heavy, allowed = np.sort(w)[::-1], (n - 1) / (2 * n)
    if heavy[:f].sum() > allowed * heavy.sum():
        cap = _cap(heavy, f, allowed)
        w = np.minimum(w, cap) if cap > 0 else np.ones(n)
    w /= w.sum()
    return w


def _cap(heavy: np.ndarray, f: int, allowed: float) -> float:
    """The c at which the f heaviest hold the share ``allowed``; 0 if too few weigh anything for there to be one.

    With the k heaviest at c and the others below it, f c = allowed (k c + rest).
    """
    for k in range(f, len(heavy)):
        rest, room = float(heavy[k:].sum()), f - allowed * k
        if room > 0 and heavy[k] <= (cap := allowed * rest / room) <= heavy[k - 1]:
            return cap
    return 0.0
