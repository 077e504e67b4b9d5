"""Nearest Neighbor Mixing, Algorithm 2 (Allouah et al., Fixing by Mixing, AISTATS 2023), transcribed."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def nnm(x: Array, f: int) -> Array:
    """Return (y_1 .. y_n). y_i is the average of the n - f nearest neighbours of x_i, which include x_i itself."""
    n, y = len(x), []
    for i in range(n):
        nearest = sorted(range(n), key=lambda j: float(np.sqrt(((x[j] - x[i]) ** 2).sum())))  # noqa: B023 (used at once)
        y_i = np.zeros_like(x[0])
        for j in nearest[: n - f]:
            y_i = y_i + x[j] / (n - f)
        y.append(y_i)
    return np.stack(y)
