"""Process large tensors block by block. A block fits into the processor's cache, and no whole tensor is copied."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 17  # values; 1 MB of float64
F64 = torch.float64

with warnings.catch_warnings():  # PyTorch warns once in a process that it has no read-only tensors
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), np.float32))


dtype_name = lru_cache(str)  # NumPy computes the name anew each time


def blocks(size: int) -> Iterator[slice]:
    """Return slices of at most ``BLOCK`` values each, which together cover 0..``size``."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def extremes(array: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value of an array that is not empty, in one pass; NaN if a value is NaN."""
    least, most = torch.aminmax(torch.from_numpy(array))
    return least.item(), most.item()


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return name -> the largest absolute value among a tensor's finite values.

    It is 0 for a tensor of integers, and for one without finite values.
    """
    return {name: _size(tensor.detach()) for name, tensor in tensors.items()}


def _size(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    least, most = (end.item() for end in torch.aminmax(tensor))
    if math.isfinite(least) and math.isfinite(most):
        return float(max(-least, most))
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def fits(tensor: Tensor, dtype: torch.dtype, before: Tensor | None = None) -> bool:
    """Tell whether all values are finite in ``dtype``.

    Args:
        tensor: The values.
        dtype: The dtype to store them in.
        before: Earlier values, in the shape of ``tensor``. A value may be infinite or NaN if it was so before.
    """
    if not dtype.is_floating_point:
        return True
    flat = tensor.reshape(-1)
    if before is not None and not bool(before.isfinite().all()):
        same = flat.to(dtype).eq(before.reshape(-1)) | (flat.isnan() & before.reshape(-1).isnan())
        return bool((same | flat.to(dtype).isfinite()).all())
    return all(bool(end.isfinite()) for block in blocks(flat.numel()) for end in torch.aminmax(flat[block].to(dtype)))


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors that share the arrays' memory. Do not change them: a received array is a part of its message's bytes."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _zeros(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros in float64, in the shapes of ``like``, in one large piece of memory.

    Freed memory returns to the operating system at once if it is one large piece, but not if it is many small ones.
    """
    whole = torch.from_numpy(np.zeros(sum(tensor.numel() for tensor in like.values())))
    pieces = whole.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


class WeightedSum:
    """Sum named tensors, each times its weight, in float64 and in the order in which they are added.

    Large tensors are added block by block, without a float64 copy of the whole tensor. The result has the same bits.

    Attributes:
        tensors: The sum so far, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def copy(self) -> WeightedSum:
        """Return an independent copy."""
        other = WeightedSum()
        other.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return other

    def add(self, parts: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> None:
        """Add ``weight * part`` for several parts (name -> tensor), faster than one by one. The first part sets the names."""
        if not self.tensors:
            self.tensors = _zeros(parts[0])
        for name, total in self.tensors.items():
            sums, values, copy = (
                total.view(-1),
                [part[name].reshape(-1) for part in parts],
                torch.empty(min(BLOCK, total.numel()), dtype=F64),
            )
            for block in blocks(total.numel()):
                few = sums[block]
                for value, weight in zip(values, weights, strict=True):
                    few.add_(copy[: few.numel()].copy_(value[block]), alpha=weight)
