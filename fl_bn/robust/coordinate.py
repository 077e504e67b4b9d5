"""Compute order statistics of the columns of a block (n, width), which is overwritten.

Up to 24 rows, a sorting network of minima and maxima of whole rows is several times
as fast as sorting columns.

References: Knuth, The Art of Computer Programming, volume 3, section 5.3.4
    (Batcher's sort).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

NETWORK = 24  # the most rows for which a network is faster than a sort


@lru_cache
def batcher(n: int) -> list[tuple[int, int]]:
    """Return pairs ``(i, j)``, i < j, whose compare-exchanges, in order, sort ``n`` values.

    One half is sorted first, so values are often still in the first-level cache.
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


def trimmed_mean(block: Any, trim: int) -> Any:
    """Return the columns' means (width,) without ``trim`` smallest and largest values."""
    n = len(block)
    if trim == 0:
        return block.sum(0) / n
    rows = list(block) if n <= NETWORK else list(np.sort(block, axis=0))
    spare = np.empty_like(rows[0])
    for i, j in batcher(n) if n <= NETWORK else ():
        low, high = rows[i], rows[j]
        np.minimum(low, high, out=spare)
        np.maximum(low, high, out=high)
        rows[i], spare = spare, low
    total = rows[trim]
    for row in rows[trim + 1 : n - trim]:
        total += row
    return total / (n - 2 * trim)


def median(block: Any) -> Any:
    """Return the columns' medians (width,): for even n the mean of the two middle values."""
    return trimmed_mean(block, (len(block) - 1) // 2)
