"""Read rows of any form, in blocks of columns that fit a core's cache.

A ``Table`` is n rows of d numbers: vectors, rows of a matrix, or named layers of any shape. It never copies
or flattens all rows at once. ``blocks`` yields ranges of columns. ``load`` copies one block (n, width)
into a buffer. ``Output`` collects the results block by block. NumPy computes all of it: torch tensors are read as arrays of the CPU, and
results go back to the type and device of the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray | Tensor
Rows = Sequence[Array] | Array | Sequence[Mapping[str, Array]]

BLOCK_BYTES = 1 << 19  # the size of a block: the block, a sorted or mixed copy and the results fit a second-level cache
PAD = 16  # unused columns after each row of a block: with a power of two, rows would compete for the same cache lines


class NonFinite(ArithmeticError):
    """Signal that a block holds NaN or Inf, or numbers whose sum overflows."""


@dataclass(frozen=True)
class Segment:
    """Describe one layer: columns ``start .. start + size`` of every row.

    Attributes:
        name: the layer's name. None: the rows are vectors, and have no layers.
        shape: the layer's shape.
        start: its first column.
        size: its number of columns.
        rows: the layer in each row, as n flat arrays that share memory with the rows where possible.
    """

    name: str | None
    shape: tuple[int, ...]
    start: int
    size: int
    rows: list[np.ndarray]


class Table:
    """Hold n rows of d columns. Results have the type, dtype and device of ``like``, which is the first row as the caller gave it."""

    def __init__(self, segments: list[Segment], like: Array | Mapping[str, Array]) -> None:
        self.segments, self.like = segments, like
        self.n, self.d = len(segments[0].rows), sum(segment.size for segment in segments)
        self.double = any(row.dtype == np.float64 for segment in segments for row in segment.rows)
        self.starts = [segment.start for segment in segments]
        self._scratch: dict[str, Any] = {}

    @classmethod
    def of(cls, rows: Rows) -> Table:
        """Make a table from a matrix, a list of vectors, or a list of named layers: all with the same names and shapes.

        Raises:
            ValueError: A row has other names or shapes than row 0, or numbers that are not floating point.
        """
        listed: list[Any] = list(rows)
        named = [row if isinstance(row, Mapping) else {None: row} for row in listed]
        forms = [{name: tuple(array.shape) for name, array in row.items() if "float" in str(array.dtype)} for row in named]
        if other := [i for i, row in enumerate(named) if forms[i] != forms[0] or len(row) > len(forms[i])]:
            raise ValueError(f"rows must be of floating-point numbers, with the names and shapes of row 0, but row {other[0]} is not")
        return cls(list(_segments(named)), listed[0])

    def keep(self, chosen: Sequence[int]) -> Table:
        """Return a table of the rows with the indices ``chosen``."""
        segments = [Segment(s.name, s.shape, s.start, s.size, [s.rows[i] for i in chosen]) for s in self.segments]
        return Table(segments, self.like)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield column ranges ``(start, stop)``, in order. Together they cover all columns; all but the last are ``width()`` wide."""
        width = self.width()
        for start in range(0, self.d, width):
            yield start, min(start + width, self.d)

    def width(self) -> int:
        """Return the number of columns of a full block."""
        return max(64, BLOCK_BYTES // ((8 if self.double else 4) * self.n) // 64 * 64)

    def load(self, start: int, stop: int, checked: bool = True) -> Any:
        """Read columns ``start .. stop`` of all rows into a buffer. The next call overwrites it.

        Args:
            start: the first column.
            stop: the column after the last.
            checked: whether the rows are known to be finite.

        Returns:
            The block (n, stop - start).

        Raises:
            NonFinite: a number is not finite. This is tested only if ``checked`` is false.
        """
        block = self.scratch("load", self.n, stop - start)
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            segment = self.segments[index]
            begin, end = start - segment.start, min(stop - segment.start, segment.size)
            at = block.shape[1] - (stop - start)
            for i, row in enumerate(segment.rows):
                block[i, at : at + end - begin] = row[begin:end]
            start, index = segment.start + end, index + 1
        if not checked and not self.finite(block).all():
            raise NonFinite
        return block

    def scratch(self, name: str, rows: int, columns: int, double: bool = False) -> Any:
        """Return a buffer (rows, columns) with arbitrary values, in memory that calls with the same ``name`` share.

        If this memory is too small, it is replaced by larger memory.

        Args:
            name: the name of the buffer.
            rows: number of rows.
            columns: number of columns.
            double: whether the buffer has float64 even if the table's other buffers have float32. Calls with one
                ``name`` must agree in this.
        """
        double = double or self.double
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape[0] < rows or buffer.shape[1] < columns:
            shape = rows, (self.width() if columns <= self.width() else columns) + PAD
            buffer = self._scratch[name] = np.empty(shape, dtype=np.float64 if double else np.float32)
        return buffer[:rows, :columns]

    def wide(self, block: Any) -> Any:
        """Return ``block`` in float64: itself, or a copy in a buffer that the next call overwrites."""
        if self.double:
            return block
        wide = self.scratch("wide", len(block), block.shape[1], double=True)
        wide[:] = block
        return wide

    def mixed(self, mix: np.ndarray, block: Any) -> Any:
        """Return ``mix @ block``: m mixtures of the rows of ``block`` (n, width), with the weights ``mix`` (m, n).

        The result (m, width) has the block's dtype. It is in a buffer that the next call overwrites.
        """
        out = self.scratch("mixed", len(mix), block.shape[1])
        return np.matmul(mix.astype(block.dtype), block, out=out)

    def total(self, shares: np.ndarray, block: Any) -> Any:
        """Return ``shares @ block`` (width,): the sum of the block's rows with weights ``shares`` (n,), in float64."""
        return shares @ self.wide(block)

    def finite(self, block: Any) -> np.ndarray:
        """Return, for each row, whether the sum of its columns is finite (n,)."""
        with np.errstate(all="ignore"):
            finite: np.ndarray = np.isfinite(block @ np.ones(block.shape[1], block.dtype))
        return finite

    def nonfinite(self) -> list[int]:
        """Return the indices of rows with a number that is not finite, or whose absolute value is above ``LARGEST``."""
        bad = np.zeros(self.n, dtype=bool)
        for start, stop in self.blocks():
            block = self.load(start, stop)
            for i in np.flatnonzero(~self.finite(block)):
                bad[i] |= not np.isfinite(block[i]).all()
            if self.double:
                bad |= abs(block).max(1, initial=0.0) > LARGEST
        return [int(i) for i in np.flatnonzero(bad)]

    def output(self) -> Output:
        """Return an ``Output`` for one result that has the form of a row. It holds no numbers yet."""
        return Output(self)


LARGEST = 1e140  # a float64 row with a larger number counts as not finite: squared distances to it would overflow


class Output:
    """Collect the result of a rule, d columns, block by block."""

    def __init__(self, table: Table) -> None:
        self._table, self._flat = table, [np.empty(segment.size, segment.rows[0].dtype) for segment in table.segments]

    def store(self, start: int, stop: int, values: Any) -> None:
        """Store the results ``values`` of columns ``start .. stop``."""
        index, done = bisect_right(self._table.starts, start) - 1, 0
        with np.errstate(over="ignore"):
            while start < stop:
                segment = self._table.segments[index]
                begin, end = start - segment.start, min(stop - segment.start, segment.size)
                self._flat[index][begin:end] = values[done : done + end - begin]
                done, start, index = done + end - begin, segment.start + end, index + 1

    @property
    def value(self) -> Any:
        """Return the result in the form of an input row: a vector, or named layers."""
        like = self._table.like
        made = {}
        for segment, flat in zip(self._table.segments, self._flat, strict=True):
            own = like[segment.name] if isinstance(like, Mapping) else like  # type: ignore[index]
            whole = flat.reshape(segment.shape)
            made[segment.name] = torch.from_numpy(whole).to(own.device, own.dtype) if isinstance(own, Tensor) else whole
        return made if isinstance(like, Mapping) else made[None]


def _segments(rows: Sequence[Mapping[Any, Array]]) -> Iterator[Segment]:
    start = 0
    for name, array in rows[0].items():
        flat = [_flat(row[name]) for row in rows]
        yield Segment(name, tuple(array.shape), start, len(flat[0]), flat)
        start += len(flat[0])


def _flat(array: Array) -> np.ndarray:
    """Flatten an array, without a copy where possible."""
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (array.float() if array.dtype is torch.bfloat16 else array).numpy()
    return array.reshape(-1)
