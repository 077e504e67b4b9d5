"""Define the input of a robust rule, a matrix of rows or mixtures of its rows, and the rule's result.

NumPy computes all of it: results go back to the type and device of the rows. A matrix is read in blocks of
columns that fit a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust.gram import Gram, blocks, gram

Rows = Sequence[np.ndarray | Tensor] | np.ndarray | Tensor

FAR = 3.0  # a row is far if its distance to the value is more than this many times the median distance
LARGEST = 1e290  # a row whose sum of squares is larger counts as not finite: squared distances to it could overflow


@dataclass(frozen=True, eq=False)
class Report:
    """Report which rows a rule rejected, and which are far from its value.

    Attributes:
        rejected: indices of rows that are not finite, or whose sum of squares is above ``LARGEST``.
        rows: the other rows (n, d).
        value: the rule's value (d,).
    """

    rejected: tuple[int, ...]
    rows: np.ndarray
    value: np.ndarray

    @cached_property
    def distances(self) -> np.ndarray:
        """Return the distances (n,) of all rows from the value, in one more pass; Inf for rejected rows."""
        squares = np.zeros(len(self.rows))
        for columns, block in blocks(self.rows):
            squares += np.square(block.astype(np.float64) - self.value[columns]).sum(1)
        distances = np.sqrt(squares)
        for row in self.rejected:  # in ascending order
            distances = np.insert(distances, row, np.inf)
        return distances

    @property
    def far(self) -> tuple[int, ...]:
        """Return the indices of rejected rows, and of those beyond ``FAR`` median distances."""
        limit = FAR * float(np.median(self.distances[np.isfinite(self.distances)]))
        return tuple(int(i) for i in np.flatnonzero(self.distances > limit))


class Outcome(NamedTuple):
    """Hold the result of a robust rule: the value, in the form of one input row, and the report."""

    value: Any
    report: Report


@dataclass(frozen=True, eq=False)
class View:
    """Hold n finite rows, at most ``f`` of them Byzantine: the rows of a matrix, or mixtures of them.

    Attributes:
        f: the number of rows that may be Byzantine, without the rejected ones.
        declared: the number of Byzantine rows that the caller declared.
        like: the caller's first row. Results have its type, dtype and device.
        mix: weights of the mixtures, (n, rows of the matrix). None: the view holds the matrix's rows
            themselves.
        whole: the view of the matrix's rows themselves; None: this one.
    """

    matrix: np.ndarray
    f: int
    declared: int
    rejected: tuple[int, ...]
    like: Any
    mix: np.ndarray | None = None
    whole: View | None = None

    @property
    def n(self) -> int:
        """Return the number of rows."""
        return len(self.matrix if self.mix is None else self.mix)

    @cached_property
    def gram(self) -> Gram:
        """Return the inner products of this view's rows."""
        if self.whole is None or self.mix is None:
            return gram(self.matrix)
        return self.whole.gram.mixed(self.mix)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the rows (n, d), for rules that users write."""
        return np.asarray(self.matrix if self.mix is None else self.mix @ self.matrix, dtype)

    def mixed(self, mix: np.ndarray) -> View:
        """Return a view of the mixtures ``mix @ rows``. Every row of ``mix`` sums to 1."""
        mix = mix if self.mix is None else mix @ self.mix
        return View(self.matrix, self.f, self.declared, self.rejected, self.like, mix, self.whole or self)

    def linear(self, weights: np.ndarray) -> Outcome:
        """Combine this view's rows with ``weights`` (n,), in float64."""
        shares = weights if self.mix is None else weights @ self.mix
        used = np.flatnonzero(shares)
        return self._outcome(lambda block: shares[used] @ block.astype(np.float64, copy=False), used)

    def by_coordinate(self, kernel: Callable[[Any], Any]) -> Outcome:
        """Combine this view's rows by ``kernel``, from a block (n, width), its own, to (width,)."""
        mix = None if self.mix is None else self.mix.astype(self.matrix.dtype)
        return self._outcome(kernel if mix is None else lambda block: kernel(mix @ block))

    def _outcome(self, combine: Callable[[Any], Any], used: np.ndarray | None = None) -> Outcome:
        value = np.empty(self.matrix.shape[1], self.matrix.dtype)
        with np.errstate(over="ignore"):
            for columns, block in blocks(self.matrix, used):
                value[columns] = combine(block)
        given = self.like
        made = torch.from_numpy(value).to(given.device, given.dtype) if isinstance(given, Tensor) else value.astype(given.dtype, copy=False)
        return Outcome(made, Report(self.rejected, self.matrix, value))


def on_view(rows: Rows | View, f: int, smallest: int, name: str, rule: Callable[[View], Outcome]) -> Outcome:
    """Apply ``rule`` to the rows without NaN or Inf. Each rejected row lowers f by one.

    Raises:
        ValueError: f is no whole number >= 0, rows are fewer than ``smallest``, every row has NaN or Inf, or
            rows are no vectors of floating-point numbers and of one length.
    """
    if isinstance(rows, View):
        # with more rejected rows than declared there is no guarantee, but the rest is still aggregated
        _check(f, rows.n if len(rows.rejected) <= rows.declared else smallest, smallest, name)
        return rule(rows)
    _check(f, len(rows), smallest, name)
    matrix = _matrix(rows)
    bad = tuple(i for i, row in enumerate(matrix) if not _finite(row))
    if bad:
        matrix = np.delete(matrix, bad, axis=0)
        _check(f, len(matrix), 1, f"{name} of the rows whose numbers are finite")
    return rule(View(matrix, max(0, f - len(bad)), f, bad, rows[0]))


def _check(f: int, n: int, smallest: int, name: str) -> None:
    if isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0 or n < smallest:
        raise ValueError(f"{name} takes a whole number f >= 0 of Byzantine rows, among at least {smallest}, but got f={f!r} among {n}")


def _matrix(rows: Rows) -> np.ndarray:
    arrays = [_array(rows)] if isinstance(rows, np.ndarray | Tensor) else [_array(row) for row in rows]
    matrix = arrays[0] if isinstance(rows, np.ndarray | Tensor) else np.stack(arrays)
    if matrix.ndim != 2 or matrix.dtype.kind != "f":
        raise ValueError(f"rows must be vectors of floating-point numbers, but got {matrix.dtype} of the shape {matrix.shape[1:]}")
    return matrix.astype(np.float64 if matrix.dtype == np.float64 else np.float32, copy=False)


def _array(rows: Any) -> np.ndarray:
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        rows = (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()
    return np.asarray(rows)


def _finite(row: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        squares = np.dot(row, row)
    return bool(squares <= LARGEST if row.dtype == np.float64 else np.isfinite(squares) or np.isfinite(row).all())
