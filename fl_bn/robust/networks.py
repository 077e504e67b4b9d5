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
    """Which results of an exchange are wanted."""

    LOW = 1
    HIGH = 2
    BOTH = 3


class Exchange(NamedTuple):
    """Wire ``low`` takes the minimum of both, wire ``high`` the maximum, as far as ``keep`` says."""

    low: int
    high: int
    keep: Keep


def batcher(n: int) -> list[tuple[int, int]]:
    """Pairs ``(i, j)``, i < j, that sort ``n`` wires in ascending order when exchanged one after the other."""
    pairs = []
    p = 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs


@lru_cache
def selection(n: int, trim: int) -> tuple[Exchange, ...]:
    """Exchanges after which wires ``trim .. n - trim - 1`` hold the middle order statistics of ``n`` values, in no particular order.

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
