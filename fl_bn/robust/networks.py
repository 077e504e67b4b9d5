"""Make sorting networks without the comparisons whose results a robust rule does not need.

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
from typing import NamedTuple


class Keep(IntFlag):
    """Name the outputs of a compare-exchange that are read later: the minimum (LOW), the maximum (HIGH), or BOTH."""

    LOW = 1
    HIGH = 2
    BOTH = 3


class Exchange(NamedTuple):
    """Describe one step of a sorting network: compare two values, and exchange them if they are in the wrong order.

    A wire is a position in the network that holds one value.

    Attributes:
        low: the wire that gets the smaller value.
        high: the wire that gets the larger value.
        keep: which of the two results are needed later. The other one need not be computed.
    """

    low: int
    high: int
    keep: Keep


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

    Raises:
        ValueError: ``trim`` is negative, or leaves no value.
    """
    if trim < 0 or 2 * trim >= n:
        raise ValueError(f"trim, the number of values to cut at either end, must be at least 0 and below half of {n}, but got {trim}")
    SUMMED, READ = 1, 2  # a wire is read only by the final sum, or also by an exchange
    wanted = dict.fromkeys(range(trim, n - trim), SUMMED)
    kept: list[Exchange] = []
    for low, high in reversed(batcher(n)):
        if wanted.get(low) == wanted.get(high) == SUMMED:
            continue
        keep = Keep(Keep.LOW * (low in wanted) | Keep.HIGH * (high in wanted))
        if keep:
            kept.append(Exchange(low, high, keep))
            wanted[low] = wanted[high] = READ
    return tuple(reversed(kept))
