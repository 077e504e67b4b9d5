"""Compute all rows' inner products, by blocks: a rule's first pass over the data.

Distances follow from them. Nearest-neighbour mixing, Krum and the geometric median
need nothing else. With C the Gram matrix of the rows about some centre, |sum_k w_k
(x_k - centre)|^2 = w' C w. So a linear combination of rows is n weights, and its d
coordinates are computed only in the last pass.

The geometric median and centred clipping start at the ``medoid``, a row near the
majority. The *usual distance* is the rows' median distance to it. A row beyond
``HORIZON`` usual distances is first moved to that distance. Otherwise its squared
distance would be so large that the others lose their precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

BLOCK_BYTES = 1 << 19  # the size of a block: the block, a sorted or mixed copy and the results fit a second-level cache
PAD = 16  # unused columns after each row of a block: with a power of two, rows would compete for the same cache lines
FLOAT32_LOSS = 0.05  # float32 resolves a squared distance to five digits if it is at least this share of the squared norms
FLOAT64_LOSS = 1e-9
HORIZON = 1e6  # usual distances
ITERATIONS = 10_000
FEW = 12  # up to this number of rows torch (MKL) is four times as fast as NumPy (OpenBLAS)


def blocks(matrix: np.ndarray, used: np.ndarray | None = None) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield each block's columns, and a copy of it (n, width), which the next one overwrites.

    ``used`` rows are read. None: all.
    """
    n, d = len(matrix) if used is None else len(used), matrix.shape[1]
    width = max(64, BLOCK_BYTES // (matrix.itemsize * n) // 64 * 64)
    buffer = np.empty((n, width + PAD), matrix.dtype)
    for start in range(0, d, width):
        columns = slice(start, min(start + width, d))
        block = buffer[:, : columns.stop - start]
        block[:] = matrix[:, columns] if used is None else matrix[used, columns]
        yield columns, block


@dataclass(frozen=True)
class Gram:
    """Hold the inner products (n, n) of n rows, in float64."""

    products: np.ndarray

    @property
    def squared_distances(self) -> np.ndarray:
        """Return the squared distances (n, n) between the rows."""
        norms = np.diag(self.products)
        squares: np.ndarray = np.maximum(norms[:, None] + norms[None, :] - 2 * self.products, 0.0)
        np.fill_diagonal(squares, 0.0)
        return squares

    def mixed(self, mix: np.ndarray) -> Gram:
        """Return the Gram matrix of ``mix @ rows``, for ``mix`` (m, n) of row sums 1."""
        return Gram(mix @ self.products @ mix.T)

    def about(self, row: int) -> np.ndarray:
        """Return the inner products (n, n) after subtracting ``row`` from all rows."""
        products = self.products
        centred: np.ndarray = products - products[row][None, :] - products[:, row][:, None] + products[row, row]
        return centred


def gram(matrix: np.ndarray) -> Gram:
    """Compute finite rows' (n, d) inner products, precisely enough for their distances.

    float32 rows are multiplied in float32, and blocks are summed in float64. If
    products overflow, or rounding hides differences, they are computed again in
    float64, and then with the ``medoid`` subtracted.
    """
    products = _products(matrix, double=False)
    if matrix.dtype != np.float64 and (not np.isfinite(products).all() or _lost(products, FLOAT32_LOSS)):
        products = _products(matrix, double=True)
    if _lost(products, FLOAT64_LOSS):
        products = _products(matrix, double=True, centre=medoid(Gram(products).squared_distances))
    return Gram(products)


def medoid(squared_distances: np.ndarray) -> int:
    """Return the index of the medoid: the smallest ball with a majority of the rows is around it.

    Among equal radii, the sum of squared distances in the ball decides.
    """
    n = len(squared_distances)
    nearest = np.sort(np.minimum(squared_distances, squared_distances.T), axis=1)[:, : n // 2 + 1]
    return int(np.lexsort((nearest.sum(1), nearest[:, -1]))[0])


def _lost(products: np.ndarray, loss: float) -> bool:
    """Return whether rounding hides the distance between some two rows.

    That is so if their squared distance is below ``loss``, what the number format
    resolves, times the sum of their squared norms. Unusually small distances need
    not be exact, so they are first raised to the smallest median of one row's
    distances to all. So two equal rows do not make the result True.
    """
    n = len(products)
    if n < 2:
        return False
    squares, norms = Gram(products).squared_distances, np.diag(products)
    usual = np.sort(squares, axis=1)[:, n // 2].min()  # the usual distance within the tightest majority: f Byzantine rows cannot raise it
    return bool((np.maximum(squares, usual) < loss * (norms[:, None] + norms[None, :])).any())


def _products(matrix: np.ndarray, double: bool, centre: int | None = None) -> np.ndarray:
    total = np.zeros((len(matrix), len(matrix)))
    with np.errstate(over="ignore", invalid="ignore"):
        for _, block in blocks(matrix):
            block = block.astype(np.float64, copy=False) if double else block
            if centre is not None:
                block -= block[centre].copy()
            rows = torch.as_tensor(block) if len(matrix) <= FEW else block
            total += np.asarray(rows @ rows.T)
    return total


class _Scene:
    """Hold the rows x_k about the medoid x_m. Coordinates b mean x_m + sum_k b_k s_k (x_k - x_m).

    The factor s_k (``scale``) is in (0, 1], below 1 if row k was moved towards the
    medoid.
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
        self.medoid = np.zeros(self.n)
        self.medoid[self.m] = 1.0

    def distances(self, b: np.ndarray) -> np.ndarray:
        pulled = self.products @ b
        squares: np.ndarray = np.maximum(b @ pulled - 2 * pulled + np.diag(self.products), 0.0)
        lengths: np.ndarray = np.sqrt(squares)
        return lengths

    def length(self, b: np.ndarray) -> float:
        return float(np.sqrt(max(b @ self.products @ b, 0.0)))

    def weights(self, b: np.ndarray) -> np.ndarray:
        """Convert ``b`` to weights (n,) of the original rows, of sum 1."""
        w = b * self.scale
        w[self.m] = 0.0
        w[self.m] = 1.0 - w.sum()
        return w


def weiszfeld(gram: Gram, tolerance: float) -> np.ndarray:
    """Compute the geometric median as weights (n,) of the rows, of sum 1.

    It stops at a step below ``tolerance`` times the usual distance.
    """
    scene = _Scene(gram)
    w, b = np.full(scene.n, 1 / scene.n), scene.medoid
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
    """Compute centred clipping's result as weights (n,) of the rows, of sum 1.

    Differences are clipped to the length ``radius``. None: the usual distance.
    """
    scene = _Scene(gram, radius or 0.0)
    w, b = np.full(scene.n, 1 / scene.n), scene.medoid
    reach = scene.usual if radius is None else radius
    for _ in range(steps):
        away = scene.distances(b)
        c = w * np.where(away > reach, reach / np.where(away > 0, away, 1.0), 1.0)
        b = b + c - c.sum() * b
    return scene.weights(b)
