"""Pass 2: order statistics of every column of a block (n, width).

Up to 24 rows a pruned sorting network runs over whole rows with minimum and maximum; above, the block is transposed in strips and sorted
along its contiguous axis, where NumPy's vectorised sort lives. Blocks are scratch: the kernels overwrite them. ``compiled`` does the same
for large tables several times as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust.networks import Keep, selection
from fl_bn.robust.table import to_numpy

NETWORK = 24  # rows up to which a network beats a sort
STRIP = 128  # columns per transposed strip: (128, n) fits a first-level cache


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
    if isinstance(block, Tensor):
        return torch.sort(block, dim=0).values[trim : n - trim].mean(0)
    if n - 2 * trim <= 2:
        return _median_of_bits(block, trim)
    middles = np.zeros(n, block.dtype)
    middles[trim : n - trim] = 1 / (n - 2 * trim)
    return _sorted_columns(block) @ middles


def median(block: Any) -> Any:
    """Return the middle value (width,) of every column; of an even number of rows the mean of the two middle ones."""
    return trimmed_mean(block, (len(block) - 1) // 2)


def _network(block: Any, trim: int) -> list[Any]:
    """Return the middle order statistics of every column, as rows (in no particular order)."""
    xp = torch if isinstance(block, Tensor) else np
    wires = [block[i] for i in range(len(block))]
    spare = xp.empty_like(wires[0])
    for low, high, keep in selection(len(wires), trim):
        a, b = wires[low], wires[high]
        if keep is Keep.BOTH:
            xp.minimum(a, b, out=spare)
            xp.maximum(a, b, out=b)
            wires[low], spare = spare, a
        elif keep is Keep.LOW:
            xp.minimum(a, b, out=a)
        else:
            xp.maximum(a, b, out=b)
    return wires[trim : len(wires) - trim]


def _median_of_bits(block: np.ndarray, trim: int) -> np.ndarray:
    """Return the median by the floats' bit patterns, read as integers: NumPy sorts those in two thirds of the time.

    As integers the negative numbers come first, but in descending order: the k-th smallest of m negatives is at m - 1 - k.
    """
    n, width = block.shape
    bits = block.view(np.int64 if block.dtype == np.float64 else np.int32)
    negatives = np.less(bits, 0).view(np.uint8).sum(0, dtype=np.uint8 if n < 256 else np.uint32).astype(np.intp)
    columns = _sorted_columns(bits).reshape(-1).view(block.dtype)
    start = np.arange(0, width * n, n)
    middles = [columns[start + np.where(k < negatives, negatives - 1 - k, k)] for k in sorted({trim, n - 1 - trim})]
    middle: np.ndarray = middles[0] if len(middles) == 1 else (middles[0] + middles[1]) * block.dtype.type(0.5)
    return middle


def _sorted_columns(block: np.ndarray) -> np.ndarray:
    """Return ``block`` (n, width) transposed, each of its columns sorted: (width, n)."""
    columns = np.empty((block.shape[1], len(block)), block.dtype)
    for at in range(0, block.shape[1], STRIP):
        strip = columns[at : at + STRIP]
        np.copyto(strip, block[:, at : at + STRIP].T)
        strip.sort(axis=1)
    return columns


def weighted_median(block: Any, weights: np.ndarray) -> np.ndarray:
    """Return the weighted median of every column.

    Args:
        block: (n, width).
        weights: (n,), of the rows.

    Returns:
        (width,): the value with half of the weight on either side; the mean of two values where it falls between them.
    """
    values, cumulated = _cumulated(block, weights)
    half, column = cumulated[-1] / 2, np.arange(block.shape[1])
    tolerance = 1e-12 * cumulated[-1]
    low = (cumulated < half - tolerance).sum(0)
    high = (cumulated <= half + tolerance).sum(0)
    middle: np.ndarray = (values[low, column] + values[np.minimum(high, len(block) - 1), column]) / 2
    return middle


def weighted_trimmed_mean(block: Any, weights: np.ndarray, trim: float) -> np.ndarray:
    """Return the weighted mean of every column without the weight ``trim`` at either end.

    Args:
        block: (n, width).
        weights: (n,), of the rows.
        trim: the part of the total weight to cut, in the unit of ``weights``.

    Returns:
        (width,).
    """
    values, cumulated = _cumulated(block, weights)
    before = np.concatenate([np.zeros((1, block.shape[1])), cumulated[:-1]])
    total = cumulated[-1]
    inside = np.clip(np.minimum(cumulated, total - trim) - np.maximum(before, trim), 0.0, None)
    inside = np.where(inside < 1e-12 * total, 0.0, inside)  # else rounding leaves a trimmed value a grain of weight
    kept: np.ndarray = np.where(inside > 0, values * inside, 0.0).sum(0) / inside.sum(0)
    return kept


def _cumulated(block: Any, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    block = to_numpy(block)
    order = np.argsort(block, axis=0, kind="stable")
    return np.take_along_axis(block, order, 0).astype(np.float64), np.cumsum(weights[order], axis=0)
