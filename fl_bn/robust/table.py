"""Read rows of any form, in blocks of columns that fit a core's cache.

A ``Table`` is n rows of d numbers: vectors, rows of a matrix, or named layers of any shape. It never copies
or flattens all rows at once. ``blocks`` yields ranges of columns. ``load`` copies one block (n, width)
into a buffer. ``Output`` collects the results block by block. NumPy arrays and torch tensors on the CPU are
read by NumPy, tensors on a GPU by torch.
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

BLOCK_BYTES = 1 << 19  # the size of a block on the CPU: the block, a sorted or mixed copy and the results fit a second-level cache
GPU_BLOCK_BYTES = 4 << 20
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
    rows: list[Array]


class Table:
    """Hold n rows of d columns. Results have the type, dtype and device of ``like``, which is the first row as the caller gave it."""

    def __init__(self, segments: list[Segment], like: Array | Mapping[str, Array]) -> None:
        self.segments, self.like = segments, like
        self.n, self.d = len(segments[0].rows), sum(segment.size for segment in segments)
        first = segments[0].rows[0]
        self.device = first.device if isinstance(first, Tensor) else None
        self.double = any(str(row.dtype).endswith("float64") for segment in segments for row in segment.rows)
        self.starts = [segment.start for segment in segments]
        self._scratch: dict[str, Any] = {}

    @classmethod
    def of(cls, rows: Rows) -> Table:
        """Make a table from a matrix, a list of vectors, or a list of named layers.

        Raises:
            ValueError: there is no row, an array is no matrix, rows differ in names or shapes, or hold no floating-point
                numbers.
        """
        if isinstance(rows, np.ndarray | Tensor) and rows.ndim != 2:
            raise ValueError(f"expected a matrix (n, d) or a list of rows, but got an array of shape {tuple(rows.shape)}")
        listed = list(rows)
        if not listed:
            raise ValueError("expected at least one row, but got none")
        if not isinstance(listed[0], Mapping):
            vectors = [{"": row} for row in listed]
            return cls(list(_segments(vectors, named=False)), listed[0])
        return cls(list(_segments(listed, named=True)), listed[0])

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
        limit = BLOCK_BYTES if self.device is None else GPU_BLOCK_BYTES
        return max(64, limit // ((8 if self.double else 4) * self.n) // 64 * 64)

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
            if self.device is None:
                buffer = np.empty(shape, dtype=np.float64 if double else np.float32)
            else:
                buffer = torch.empty(shape, dtype=torch.float64 if double else torch.float32, device=self.device)
            self._scratch[name] = buffer
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
        if self.device is None:
            return np.matmul(mix.astype(block.dtype), block, out=out)
        return torch.matmul(torch.as_tensor(mix, dtype=block.dtype, device=block.device), block, out=out)

    def total(self, shares: np.ndarray, block: Any) -> Any:
        """Return ``shares @ block`` (width,): the sum of the block's rows with weights ``shares`` (n,), in float64."""
        wide = self.wide(block)
        return shares @ wide if self.device is None else torch.as_tensor(shares, device=wide.device) @ wide

    def finite(self, block: Any) -> np.ndarray:
        """Return, for each row, whether the sum of its columns is finite (n,)."""
        ones = np.ones(block.shape[1], block.dtype) if self.device is None else torch.ones_like(block[0])
        with np.errstate(all="ignore"):
            finite: np.ndarray = np.isfinite(to_numpy(block @ ones))
        return finite

    def nonfinite(self) -> list[int]:
        """Return the indices of rows with a number that is not finite, or whose absolute value is above ``LARGEST``."""
        bad = np.zeros(self.n, dtype=bool)
        for start, stop in self.blocks():
            block = self.load(start, stop)
            for i in np.flatnonzero(~self.finite(block)):
                bad[i] |= not np.isfinite(to_numpy(block[i])).all()
            if self.double:
                bad |= to_numpy(abs(block)).max(1, initial=0.0) > LARGEST
        return [int(i) for i in np.flatnonzero(bad)]

    def output(self) -> Output:
        """Return an ``Output`` for one result that has the form of a row. It holds no numbers yet."""
        return Output(self)


LARGEST = 1e140  # a float64 row with a larger number counts as not finite: squared distances to it would overflow


class Output:
    """Collect the result of a rule, d columns, block by block.

    Attributes:
        value: the result, in the form of an input row (a vector, or named layers).
    """

    def __init__(self, table: Table) -> None:
        self.value: Any
        self._flat: list[Any] = []
        self._table = table
        made = {}
        for segment in table.segments:
            row = segment.rows[0]
            whole: Any
            if isinstance(row, Tensor):
                whole = torch.empty(segment.shape, dtype=row.dtype, device=row.device)
            else:
                whole = np.empty(segment.shape, row.dtype)
            self._flat.append(whole.reshape(-1))
            made[segment.name] = _as_it_came(whole, table.like if segment.name is None else table.like[segment.name])  # type: ignore[index]
        self.value = made if isinstance(table.like, Mapping) else made[None]

    def store(self, start: int, stop: int, values: Any) -> None:
        """Store the results ``values`` of columns ``start .. stop``."""
        index, done = bisect_right(self._table.starts, start) - 1, 0
        if isinstance(self._flat[0], Tensor) and not isinstance(values, Tensor):
            values = torch.from_numpy(values).to(self._flat[0].device)
        with np.errstate(over="ignore"):
            while start < stop:
                segment = self._table.segments[index]
                begin, end = start - segment.start, min(stop - segment.start, segment.size)
                self._flat[index][begin:end] = values[done : done + end - begin]
                done, start, index = done + end - begin, segment.start + end, index + 1


def _segments(rows: Sequence[Mapping[str, Array]], named: bool) -> Iterator[Segment]:
    first, start = rows[0], 0
    for i, row in enumerate(rows):
        if list(row) != list(first) and set(row) != set(first):
            raise ValueError(f"row {i} has layers {sorted(row)}, but row 0 has {sorted(first)}")
    by_torch = any(isinstance(_flat(array), Tensor) for row in rows for array in row.values())
    for name, array in first.items():
        shape = tuple(array.shape)
        where = f"layer {name!r} of row " if named else "row "
        flat = []
        for i, row in enumerate(rows):
            if tuple(row[name].shape) != shape:
                raise ValueError(f"{where}{i} has shape {tuple(row[name].shape)}, but row 0 has {shape}")
            if "float" not in str(row[name].dtype):
                raise ValueError(f"{where}{i} has dtype {row[name].dtype}: expected floating-point numbers")
            flat.append(_flat(row[name]))
        size = int(np.prod(shape))
        if by_torch:  # if NumPy cannot read one layer, torch reads them all
            flat = [a if isinstance(a, Tensor) else torch.from_numpy(np.array(a)) for a in flat]
        yield Segment(name if named else None, shape, start, size, flat)
        start += size


def _flat(array: Array) -> Array:
    """Flatten an array without a copy where possible, by NumPy if it can read the array."""
    if isinstance(array, Tensor):
        array = array.detach().reshape(-1)
        if array.device.type == "cpu" and array.dtype is not torch.bfloat16:
            return array.numpy()
        return array
    return array.reshape(-1)


def _as_it_came(array: Any, like: Any) -> Any:
    return torch.from_numpy(array) if isinstance(like, Tensor) and isinstance(array, np.ndarray) else array


def to_numpy(array: Any) -> np.ndarray:
    """Return ``array`` as a NumPy array, copied from the GPU if it is there."""
    return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
