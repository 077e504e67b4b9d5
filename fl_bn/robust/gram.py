"""Pass 1: the inner products of all rows, block by block. Distances, and with them NNM, Krum and the geometric median, need no more.

With C the Gram matrix of the rows about some centre, |sum_k w_k (x_k - centre)|^2 = w' C w: whatever is a linear combination of rows is
handled as its n weights, and no vector of d numbers is touched before the last pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fl_bn.robust.table import NonFinite, Table, to_numpy

FLOAT32_LOSS = 0.05  # smallest share of squared distance in the squared norms that float32 products resolve to five digits
FLOAT64_LOSS = 1e-9
FEW = 12  # rows up to which torch (MKL) multiplies them four times as fast as NumPy (OpenBLAS)


@dataclass(frozen=True)
class Gram:
    """Hold the inner products of n rows.

    Attributes:
        products: (n, n), float64.
        centre: the row that the products are about; None: the origin.
    """

    products: np.ndarray
    centre: int | None = None

    @property
    def squared_distances(self) -> np.ndarray:
        """Return the squared distances (n, n) between the rows, the diagonal zero."""
        norms = np.diag(self.products)
        squares: np.ndarray = np.maximum(norms[:, None] + norms[None, :] - 2 * self.products, 0.0)
        np.fill_diagonal(squares, 0.0)
        return squares

    def mixed(self, mix: np.ndarray) -> Gram:
        """Return the Gram matrix of the rows ``mix @ rows``, for ``mix`` (m, n) whose rows each sum to 1."""
        return Gram(mix @ self.products @ mix.T)

    def about(self, row: int) -> np.ndarray:
        """Return the products about ``row``."""
        products = self.products
        centred: np.ndarray = products - products[row][None, :] - products[:, row][:, None] + products[row, row]
        return centred


def gram(table: Table, checked: bool = False) -> Gram:
    """Compute the inner products of a table's rows, as exact as distances between the rows need.

    float32 rows are multiplied in float32 and summed over blocks in float64. Where the rows have so much in common that their
    differences drown in rounding, once more in float64, and then about a row in their midst.

    Args:
        table: the rows.
        checked: whether the rows are known to be finite.

    Returns:
        The products, about the origin or about a row.

    Raises:
        NonFinite: a row is not finite, or so large that its square overflows float64.
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
    """Return the row whose nearest majority is nearest: among the honest rows if these are the majority.

    Sums decide between equals.

    Args:
        squared_distances: (n, n).
    """
    n = len(squared_distances)
    nearest = np.sort(np.minimum(squared_distances, squared_distances.T), axis=1)[:, : n // 2 + 1]
    return int(np.lexsort((nearest.sum(1), nearest[:, -1]))[0])


def _lost(products: np.ndarray, loss: float) -> bool:
    """Tell whether some squared distance is so small beside the squared norms that its digits are rounding errors.

    Of rows closer than usual (copies, say) it is enough to know that.
    """
    n = len(products)
    if n < 2:
        return False
    squares, norms = Gram(products).squared_distances, np.diag(products)
    usual = np.sort(squares, axis=1)[:, n // 2].min()  # of the tightest majority: no f rows can raise it
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
