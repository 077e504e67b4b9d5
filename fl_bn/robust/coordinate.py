"""Compute order statistics of every column of a block (n, width), such as its median. This is a rule's second pass.

For up to 24 rows, a pruned sorting network computes minima and maxima of whole rows. For more rows, the block is
transposed in strips and sorted along the contiguous axis, where NumPy's sort is fast. The functions overwrite
their blocks.

The full network is Batcher's odd-even merge sort for any number of wires. ``selection`` goes through its
compare-exchanges from the last to the first. It removes a compare-exchange if neither output is needed later. It
keeps only the minimum or the maximum if only that one is needed. It also removes a compare-exchange whose two
outputs are only added up, since their order does not change the sum.

References:
    Knuth, The Art of Computer Programming, volume 3, section 5.3.4.
"""

from __future__ import annotations

from enum import IntFlag
from functools import lru_cache
from typing import Any

import numpy as np

NETWORK = 24  # the most rows for which a network is faster than a sort
STRIP = 128  # columns per transposed strip: (128, n) fits a first-level cache


class Keep(IntFlag):
    """Name the outputs of a compare-exchange that are read later: the minimum (LOW), the maximum (HIGH), or BOTH."""

    LOW = 1
    HIGH = 2
    BOTH = 3


Exchange = tuple[int, int, Keep]
"""A step of a sorting network: the wire that gets the smaller of two values, that of the larger, and which of the two are read later.

A wire is a position in the network that holds one value.
"""


def batcher(n: int) -> list[tuple[int, int]]:
    """Return pairs ``(i, j)`` of wires, i < j. Compare-exchanges of these pairs, in order, sort ``n`` values in ascending order.

    One half is sorted before the other half begins. So the values that an exchange reads are often still in registers or
    in the first-level cache.
    """
    pairs: list[tuple[int, int]] = []

    def merge(start: int, size: int, step: int) -> None:
        if 2 * step == size:
            pairs.append((start, start + step))
            return
        merge(start, size, 2 * step)
        merge(start + step, size, 2 * step)
        pairs.extend((i, i + step) for i in range(start + step, start + size - step, 2 * step))

    def sort(start: int, size: int) -> None:
        if size > 1:
            sort(start, size // 2)
            sort(start + size // 2, size // 2)
            merge(start, size, 1)

    sort(0, 1 << max(0, n - 1).bit_length())
    return [(i, j) for i, j in pairs if j < n]  # the wires from n on would hold +Inf all the time


@lru_cache
def selection(n: int, trim: int) -> tuple[Exchange, ...]:
    """Return compare-exchanges after which wires ``trim .. n - trim - 1`` hold the middle values, in no particular order.

    Args:
        n: the number of values.
        trim: how many values are cut at either end.

    Returns:
        The exchanges, in the order in which to make them.
    """
    SUMMED, READ = 1, 2  # a wire is read only by the final sum, or also by an exchange
    wanted = dict.fromkeys(range(trim, n - trim), SUMMED)
    kept: list[Exchange] = []
    for low, high in reversed(batcher(n)):
        if wanted.get(low) == wanted.get(high) == SUMMED:
            continue
        keep = Keep(Keep.LOW * (low in wanted) | Keep.HIGH * (high in wanted))
        if keep:
            kept.append((low, high, keep))
            wanted[low] = wanted[high] = READ
    return tuple(reversed(kept))


def trimmed_mean(block: Any, trim: int) -> Any:
    """Return the mean (width,) of every column of ``block`` (n, width) without its ``trim`` smallest and ``trim`` largest values."""
    n = len(block)
    if trim == 0:
        return block.sum(0) / n
    if n <= NETWORK:
        chosen = _network(block, trim)
        total = chosen[0]
        for row in chosen[1:]:
            total += row
        total /= len(chosen)
        return total
    middle: np.ndarray = _sorted_columns(block)[:, trim : n - trim].mean(1)
    return middle


def median(block: Any) -> Any:
    """Return the median (width,) of every column. For an even number of rows it is the mean of the two middle values."""
    return trimmed_mean(block, (len(block) - 1) // 2)


def _network(block: Any, trim: int) -> list[Any]:
    """Return the middle order statistics of every column, as rows (in no particular order)."""
    wires = [block[i] for i in range(len(block))]
    spare = np.empty_like(wires[0])
    for low, high, keep in selection(len(wires), trim):
        a, b = wires[low], wires[high]
        if keep is Keep.BOTH:
            np.minimum(a, b, out=spare)
            np.maximum(a, b, out=b)
            wires[low], spare = spare, a
        elif keep is Keep.LOW:
            np.minimum(a, b, out=a)
        else:
            np.maximum(a, b, out=b)
    return wires[trim : len(wires) - trim]


def _sorted_columns(block: np.ndarray) -> np.ndarray:
    """Sort every column of ``block`` (n, width), and return the transposed result (width, n)."""
    columns = np.empty((block.shape[1], len(block)), block.dtype)
    for at in range(0, block.shape[1], STRIP):
        strip = columns[at : at + STRIP]
        np.copyto(strip, block[:, at : at + STRIP].T)
        strip.sort(axis=1)
    return columns
