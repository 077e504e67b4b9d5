"""Limit the weights that clients report about themselves, so that a few false weights cannot outweigh all other clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def capped(weights: Sequence[float] | np.ndarray, f: int) -> np.ndarray:
    """Cut ``weights`` at a common cap, so that the ``f`` heaviest rows together hold less than half of the total.

    The cap is the largest at which these rows hold at most the share (n - 1) / 2n. For odd n, that is the share of
    (n - 1) / 2 rows of equal weight, the largest minority. If at most 2f weights are positive, no cap
    is small enough, and all rows get the same weight.

    Args:
        weights: the weights (n,), each at least 0.
        f: the number of rows that may be Byzantine.

    Returns:
        The weights after the cut (n,). They sum to 1.

    Raises:
        ValueError: a weight is negative or not finite, all are zero, or f is not below n / 2.
    """
    w: np.ndarray = np.array(weights, dtype=np.float64)
    n = len(w)
    if not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError(f"weights must be finite, not negative and not all zero, but got {w.tolist()}")
    if not 0 <= 2 * f < n:
        raise ValueError(f"capping weights against Byzantine rows: f={f} needs at least {2 * f + 1} weights, but got {n}: reduce f")
    pivot = np.sort(w)[::-1][2 * f]  # no cap is larger than n * n times this weight, so larger weights are all treated alike
    shares = w / w.max()
    heavy, allowed = np.sort(shares)[::-1], (n - 1) / (2 * n)
    if heavy[:f].sum() <= allowed * heavy.sum():
        w = shares
    elif pivot == 0:
        w = np.ones(n)
    else:
        with np.errstate(over="ignore"):
            w = np.minimum(w / pivot, float(n * n))
        w = np.minimum(w, _cap(np.sort(w)[::-1], f, allowed) or 1.0)
    w /= w.sum()
    return w


def _cap(heavy: np.ndarray, f: int, allowed: float) -> float:
    """Return the cap c at which the f heaviest rows hold the share ``allowed``. 0 if too few weights are positive.

    If the k heaviest are cut to c, then min(k, f) c + uncut = allowed (k c + rest). Here ``rest`` is the sum
    of the other weights, and ``uncut`` the sum of those among the f heaviest that are not cut.
    """
    for k in range(1, len(heavy)):
        rest, uncut, room = float(heavy[k:].sum()), float(heavy[k:f].sum()), min(k, f) - allowed * k
        if room > 0 and heavy[k] <= (cap := (allowed * rest - uncut) / room) <= heavy[k - 1]:
            return cap
    return 0.0
