# ruff: noqa: N803, N806 (the names of the paper)
"""Gradient clipping: by the norm over all parameters (Pascanu, Mikolov, Bengio 2013), by value, and adaptive: AGC (Brock, De, Smith,
Simonyan 2021, equation 3), transcribed.

AGC multiplies the gradient G_i of a unit i by λ max(||W_i||, ε) / ||G_i|| if ||G_i|| / max(||W_i||, ε) > λ, with ε = 1e-3. A unit is the
row of a matrix, or the kernels of one output channel; a vector is one unit.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def norm(a: Array) -> float:
    return math.sqrt(sum(float(v) ** 2 for v in a.ravel()))


def by_norm(G: list[Array], limit: float) -> list[Array]:
    total = math.sqrt(sum(norm(g) ** 2 for g in G))
    return [g * limit / total for g in G] if total > limit else [g.copy() for g in G]


def by_value(G: list[Array], limit: float) -> list[Array]:
    return [np.maximum(-limit, np.minimum(limit, g)) for g in G]


def agc(W: list[Array], G: list[Array], λ: float, ε: float = 1e-3) -> list[Array]:
    clipped = []
    for W_l, G_l in zip(W, G, strict=True):
        units = range(len(W_l)) if W_l.ndim > 1 else [slice(None)]
        new = G_l.copy()
        for i in units:
            most = λ * max(norm(W_l[i]), ε)
            if norm(G_l[i]) > most:
                new[i] = most / norm(G_l[i]) * G_l[i]
        clipped.append(new)
    return clipped
