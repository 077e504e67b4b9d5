"""Compute the inner products of all rows, block by block. This is a rule's first pass over the data.

Distances follow from inner products. Nearest-neighbour mixing, Krum and the geometric median need nothing else.
Let C be the Gram matrix of the rows about some centre. Then |sum_k w_k (x_k - centre)|^2 = w' C w. So a linear
combination of rows is handled as n weights, and its d coordinates are computed only in the last pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fl_bn.robust.table import NonFinite, Table, to_numpy

FLOAT32_LOSS = 0.05  # float32 resolves a squared distance to five digits if it is at least this share of the squared norms
FLOAT64_LOSS = 1e-9
FEW = 12  # up to this number of rows torch (MKL) is four times as fast as NumPy (OpenBLAS)


@dataclass(frozen=True)
class Gram:
    """Hold the inner products of n rows.

    Attributes:
        products: (n, n), float64.
        centre: the index of the row that is subtracted from all rows. None: no row is subtracted.
    """

    products: np.ndarray
    centre: int | None = None

    @property
    def squared_distances(self) -> np.ndarray:
        """Return the squared distances (n, n) between the rows. The diagonal is zero."""
        norms = np.diag(self.products)
        squares: np.ndarray = np.maximum(norms[:, None] + norms[None, :] - 2 * self.products, 0.0)
        np.fill_diagonal(squares, 0.0)
        return squares

    def mixed(self, mix: np.ndarray) -> Gram:
        """Return the Gram matrix of the rows ``mix @ rows``, for ``mix`` (m, n) whose rows each sum to 1."""
        return Gram(mix @ self.products @ mix.T)

    def about(self, row: int) -> np.ndarray:
        """Return the inner products (n, n) after ``row`` is subtracted from all rows."""
        products = self.products
        centred: np.ndarray = products - products[row][None, :] - products[:, row][:, None] + products[row, row]
        return centred


def gram(table: Table, checked: bool = False) -> Gram:
    """Compute the inner products of a table's rows, precisely enough for the distances between rows.

    float32 rows are multiplied in float32, and the blocks are summed in float64. If the rows are so similar
    that rounding hides their differences, the products are computed again in float64. If that is not enough,
    the ``medoid`` is subtracted from all rows first.

    Args:
        table: the rows.
        checked: whether the rows are known to be finite.

    Returns:
        The inner products.

    Raises:
        NonFinite: a row is not finite, or so large that the sum of its squares overflows float64.
    """
    products = _products(table, double=table.double, checked=checked)
    if not table.double and (not np.isfinite(products).all() or _lost(products, FLOAT32_LOSS)):
        products = _products(table, double=True, checked=checked)
    if not np.isfinite(products).all():
        raise NonFinite
    if _lost(products, FLOAT64_LOSS):
        centre = medoid(Gram(products).squared_distances)
        return Gram(_products(table, double=True, checked=True, centre=centre), centre)
    return Gram(products)


def medoid(squared_distances: np.ndarray) -> int:
    """Return the index of the medoid: the row around which a ball needs the smallest radius to hold a majority of the rows.

    If most rows are honest, the medoid is near honest rows. If the balls of several rows have the same radius, the smallest
    sum of squared distances to the rows in the ball decides.

    Args:
        squared_distances: (n, n).
    """
    n = len(squared_distances)
    nearest = np.sort(np.minimum(squared_distances, squared_distances.T), axis=1)[:, : n // 2 + 1]
    return int(np.lexsort((nearest.sum(1), nearest[:, -1]))[0])


def _lost(products: np.ndarray, loss: float) -> bool:
    """Return whether rounding hides the distance between some two rows.

    It does if the squared distance of these rows is below ``loss`` times the sum of their squared norms. Distances that
    are much smaller than usual need not be exact, so they are raised to a lower limit before this test. The limit is the
    median of one row's distances to all rows, for the row with the smallest median. So the result is not True only
    because two rows are equal.

    Args:
        products: the inner products of the rows, (n, n).
        loss: the smallest share of the squared norms that the number format resolves: ``FLOAT32_LOSS`` or
            ``FLOAT64_LOSS``.
    """
    n = len(products)
    if n < 2:
        return False
    squares, norms = Gram(products).squared_distances, np.diag(products)
    usual = np.sort(squares, axis=1)[:, n // 2].min()  # the usual distance within the tightest majority: f Byzantine rows cannot raise it
    return bool((np.maximum(squares, usual) < loss * (norms[:, None] + norms[None, :])).any())


def _products(table: Table, double: bool, checked: bool, centre: int | None = None) -> np.ndarray:
    total = np.zeros((table.n, table.n))
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in table.blocks():
            block = table.load(start, stop, checked)
            if double and not table.double:
                block = table.wide(block)
            if centre is not None:
                block -= block[centre].copy() if table.device is None else block[centre].clone()
            rows = torch.as_tensor(block) if table.n <= FEW else block
            total += to_numpy(rows @ rows.T)
    return total
