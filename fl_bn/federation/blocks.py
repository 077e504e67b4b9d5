"""Large tensors read a block at a time: what is made of a block stays in the processor's cache, and no copy of the whole is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 17  # values; 1 MB of float64
F64 = torch.float64

with warnings.catch_warnings():  # PyTorch warns once in a process that it knows no tensors that cannot be written
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), np.float32))


dtype_name = lru_cache(str)  # NumPy works the name out anew each time


def blocks(size: int) -> Iterator[slice]:
    """Slices of at most ``BLOCK`` that cover ``size`` values."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def extremes(array: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest of an array's values, at least one; NaN where a value is NaN. One pass over the memory."""
    least, most = torch.aminmax(torch.from_numpy(array))
    return least.item(), most.item()


def fits(tensor: Tensor, dtype: torch.dtype, before: Tensor | None = None) -> bool:
    """Say whether all values are finite in ``dtype``. Infinite numbers and NaN that ``before`` has at the same place pass."""
    if not dtype.is_floating_point:
        return True
    flat = tensor.reshape(-1)
    if before is not None and not bool(before.isfinite().all()):
        same = flat.to(dtype).eq(before.reshape(-1)) | (flat.isnan() & before.reshape(-1).isnan())
        return bool((same | flat.to(dtype).isfinite()).all())
    return all(bool(end.isfinite()) for block in blocks(flat.numel()) for end in torch.aminmax(flat[block].to(dtype)))


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Tensors in the arrays' own memory, to be read and never written: an array off the wire lies in its message's bytes."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _zeros(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float64, in one piece of memory, which goes back to the system as soon as it is free; many smaller ones would not."""
    whole = torch.from_numpy(np.zeros(sum(tensor.numel() for tensor in like.values())))
    pieces = whole.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


class WeightedSum:
    """The sum of named tensors, each times its weight: float64, in the order in which they are added.

    ``tensors``: the sum so far, by name. Large tensors are added a block at a time, without a copy of them in float64; that changes no bit.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def copy(self) -> WeightedSum:
        other = WeightedSum()
        other.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return other

    def add(self, parts: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> None:
        """The first part says which names there are. Several parts at once cost less than one after the other."""
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
