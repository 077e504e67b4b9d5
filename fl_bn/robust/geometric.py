"""Compute the rules that use only distances between rows: the geometric median and centred clipping.

Both compute with the n weights of the rows instead of d coordinates. They start at the ``medoid``, which is a row near
the majority of rows. All their points are weighted means of rows, so adding a vector to every row adds it to the
result. The *usual distance* is the median of the rows' distances to the medoid. If a row is farther from the medoid
than ``HORIZON`` usual distances, it is first moved towards the medoid, to that distance. Otherwise the square of its
distance would be so large that the other rows' distances lose their precision.
"""

from __future__ import annotations

import numpy as np

from fl_bn.robust.gram import Gram, medoid

HORIZON = 1e6
ITERATIONS = 10_000


class _Scene:
    """Hold the rows x_k relative to the medoid x_m. Coordinates b stand for the point x_m + sum_k b_k s_k (x_k - x_m).

    The factor s_k (``scale``) is in (0, 1]. It is below 1 if row k was moved towards the medoid.
    """

    def __init__(self, gram: Gram, reach: float = 0.0) -> None:
        self.n = len(gram.products)
        squares = gram.squared_distances
        self.m = medoid(squares)
        away = np.sqrt(squares[self.m])
        self.usual = float(np.sort(away)[self.n // 2])  # the distance to the nearest majority of rows: f Byzantine rows cannot raise it
        horizon = max(HORIZON * self.usual, 10 * reach)
        self.scale = np.where(away > horizon, horizon / np.where(away > 0, away, 1.0), 1.0) if horizon > 0 else np.ones(self.n)
        self.products = gram.about(self.m) * np.outer(self.scale, self.scale)

    def distances(self, b: np.ndarray) -> np.ndarray:
        """Return the distances (n,) of the rows to the point ``b``."""
        pulled = self.products @ b
        squares: np.ndarray = np.maximum(b @ pulled - 2 * pulled + np.diag(self.products), 0.0)
        lengths: np.ndarray = np.sqrt(squares)
        return lengths

    def length(self, b: np.ndarray) -> float:
        """Return the distance between two points. ``b`` is the difference of their coordinates."""
        return float(np.sqrt(max(b @ self.products @ b, 0.0)))

    def weights(self, b: np.ndarray) -> np.ndarray:
        """Convert the point ``b`` to weights (n,) of the original rows. The weights sum to 1."""
        w = b * self.scale
        w[self.m] = 0.0
        w[self.m] = 1.0 - w.sum()
        return w


def weiszfeld(gram: Gram, tolerance: float) -> np.ndarray:
    """Compute the geometric median as weights of the rows.

    Args:
        gram: inner products of the n rows.
        tolerance: the iteration stops when a step is shorter than this share of the usual distance, which is the median of
            the rows' distances to the medoid.

    Returns:
        Weights (n,), which sum to 1.
    """
    scene = _Scene(gram)
    w = np.full(scene.n, 1 / scene.n)
    b = np.zeros(scene.n)
    b[scene.m] = 1.0
    if scene.usual == 0.0:
        return scene.weights(b)
    for _ in range(ITERATIONS):
        away = scene.distances(b)
        here = away <= 1e-12 * scene.usual
        pull = np.where(here, 0.0, w / np.where(here, 1.0, away))
        if not pull.any():
            break
        target = pull / pull.sum()
        if here.any():  # at a row: leave it only if the other rows' pull is stronger than its weight
            force = pull.sum() * scene.length(target - b)
            hold = float(w[here].sum())
            if force <= hold:
                break
            target = b + (1 - hold / force) * (target - b)
        moved = scene.length(target - b)
        b = target
        if moved <= tolerance * scene.usual:
            break
    return scene.weights(b)


def clip(gram: Gram, radius: float | None, steps: int) -> np.ndarray:
    """Compute the result of centred clipping as weights of the rows.

    Args:
        gram: inner products of the n rows.
        radius: the length to which the rows' differences from the current point are clipped. None: the median of the rows'
            distances to the medoid.
        steps: the number of iterations.

    Returns:
        Weights (n,), which sum to 1.
    """
    scene = _Scene(gram, radius or 0.0)
    w = np.full(scene.n, 1 / scene.n)
    reach = scene.usual if radius is None else radius
    b = np.zeros(scene.n)
    b[scene.m] = 1.0
    for _ in range(steps):
        away = scene.distances(b)
        c = w * np.where(away > reach, reach / np.where(away > 0, away, 1.0), 1.0)
        b = b + c - c.sum() * b
    return scene.weights(b)
