# ruff: noqa: N803, N806 (the names of the paper)
"""Krum and Multi-Krum (Blanchard et al., NeurIPS 2017, section 4), transcribed.

V_1 .. V_n are the proposed vectors, f of them Byzantine; i → j means that V_j is among the n - f - 2 closest vectors to V_i.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def closest(V: Array, i: int, count: int) -> list[int]:
    """Return the indices j of the ``count`` vectors that are closest to V_i."""
    others = [j for j in range(len(V)) if j != i]
    others.sort(key=lambda j: float(((V[i] - V[j]) ** 2).sum()))
    return others[:count]


def s(V: Array, i: int, f: int) -> float:
    """Return the score of worker i."""
    n, score = len(V), 0.0
    for j in closest(V, i, n - f - 2):
        score += float(((V[i] - V[j]) ** 2).sum())
    return score


def krum(V: Array, f: int) -> Array:
    """Return the vector with the lowest score; of several, the one with the smallest index."""
    i_star = 0
    for i in range(1, len(V)):
        if s(V, i, f) < s(V, i_star, f):
            i_star = i
    return V[i_star]


def multi_krum(V: Array, f: int, m: int) -> Array:
    """Return the average of the m vectors with the lowest scores."""
    best = sorted(range(len(V)), key=lambda i: s(V, i, f))[:m]
    average = np.zeros_like(V[0])
    for i in best:
        average = average + V[i] / m
    return average
