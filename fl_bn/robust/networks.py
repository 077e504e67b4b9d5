"""Sorting networks, pruned to the outputs that a rule needs.

Batcher's odd-even merge sort for any number of wires, walked backwards: an exchange whose outputs nobody reads goes, of one with
a single reader only that minimum or maximum stays, and two outputs that are only ever added to one sum need no order.

Knuth, The Art of Computer Programming, volume 3, section 5.3.4.
"""

from __future__ import annotations

from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple


class Keep(IntFlag):
    """Say which outputs of a compare-exchange are read later: the minimum (LOW), the maximum (HIGH), or BOTH."""

    LOW = 1
    HIGH = 2
    BOTH = 3


class Exchange(NamedTuple):
    """Give wire ``low`` the minimum of both and wire ``high`` the maximum, as far as ``keep`` says."""

    low: int
    high: int
    keep: Keep


def batcher(n: int) -> list[tuple[int, int]]:
    """Return pairs ``(i, j)``, i < j, that sort ``n`` wires in ascending order when exchanged one after the other.

    Depth first: a half is sorted before the other half begins, so that the wires of neighbouring exchanges are still in registers or
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
    return [(i, j) for i, j in pairs if j < n]  # wires from n on hold +Inf, and keep it


@lru_cache
def selection(n: int, trim: int) -> tuple[Exchange, ...]:
    """Return exchanges after which wires ``trim .. n - trim - 1`` hold the middle order statistics, in no particular order.

    Args:
        n: the number of values.
        trim: how many are cut at either end.

    Returns:
        The exchanges, to be made one after the other.

    Raises:
        ValueError: nothing would remain.
    """
    if trim < 0 or 2 * trim >= n:
        raise ValueError(f"trimming {trim} of {n} values on either side leaves none")
    SUMMED, READ = 1, 2  # a wire read only by the final sum, or by an exchange
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
