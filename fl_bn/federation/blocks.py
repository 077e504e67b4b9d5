"""Process large tensors block by block. A block fits into the processor's cache, and no whole tensor is copied."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 17  # values; 1 MB of float64
SMALL = 1 << 14  # the largest number of values of a tensor that is processed together with others
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
    found = dict.fromkeys(tensors, 0.0)
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    if floats:
        norms = torch._foreach_norm(list(floats.values()), math.inf)  # one call for all of them
        found |= {name: norm.item() for name, norm in zip(floats, norms, strict=True)}
    for name, tensor in floats.items():
        if not math.isfinite(found[name]):
            finite = tensor[tensor.isfinite()]
            found[name] = float(finite.abs().max()) if finite.numel() else 0.0
    return found


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all values of ``tensors`` are finite. Small tensors of one dtype are checked together."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return all(math.isfinite(end.item()) for tensor in joined(floats) for end in torch.aminmax(tensor))


def joined(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return flat tensors (one axis) with the values of ``tensors``. Small tensors of one dtype and device are joined into one."""
    large, small = list[Tensor](), dict[tuple[torch.dtype, torch.device], list[Tensor]]()
    for tensor in tensors:
        flat = tensor.reshape(-1)
        (large if flat.numel() > SMALL else small.setdefault((flat.dtype, flat.device), [])).append(flat)
    return large + [torch.cat(group) if len(group) > 1 else group[0] for group in small.values()]


def fits(tensor: Tensor, dtype: torch.dtype, before: Tensor | None = None) -> bool:
    """Tell whether all values stay finite when they are stored in ``dtype``.

    Args:
        tensor: The values.
        dtype: The dtype to store them in.
        before: Earlier values, in the shape of ``tensor``. A value may be infinite or NaN if the earlier value is the same.
    """
    if not dtype.is_floating_point:
        return True
    flat = tensor.reshape(-1)
    if all(math.isfinite(end.item()) for block in blocks(flat.numel()) for end in torch.aminmax(flat[block].to(dtype))):
        return True
    if before is None:
        return False
    same = flat.to(dtype).eq(before.reshape(-1)) | (flat.isnan() & before.reshape(-1).isnan())
    return bool((same | flat.to(dtype).isfinite()).all())


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors that share the arrays' memory. Do not change them: a received array is a part of its message's bytes."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class WeightedSum:
    """Sum named tensors, each times its weight, in float64 and in the order in which they are added.

    Large tensors are added block by block, without a float64 copy of the whole tensor. Neighbouring small
    tensors of one dtype are added as one block. Neither changes a bit of the sum.

    Attributes:
        tensors: The sum so far, by name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._whole = torch.empty(0)
        self._runs: list[list[str]] = []

    def copy(self) -> WeightedSum:
        """Return an independent copy."""
        other = WeightedSum()
        if self.tensors:
            other._begin(self.tensors, self._whole.clone(), self._runs)
        return other

    def add(self, parts: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> None:
        """Add ``weight * part`` for several parts (name -> tensor), faster than one by one. The first part gives the sum its names."""
        if not self.tensors:
            # Freed memory returns to the operating system at once if it is one large piece, but not if it is many small ones.
            whole = torch.from_numpy(np.zeros(sum(tensor.numel() for tensor in parts[0].values())))
            self._begin(parts[0], whole, _runs(parts[0]))
        start = 0
        for names in self._runs:
            values = [_flat([part[name] for name in names]) for part in parts]
            sums = self._whole[start : start + len(values[0])]
            start += len(sums)
            copy = torch.empty(min(BLOCK, len(sums)), dtype=F64)
            for block in blocks(len(sums)):
                few = sums[block]
                for value, weight in zip(values, weights, strict=True):
                    few.add_(copy[: len(few)].copy_(value[block]), alpha=weight)

    def _begin(self, like: Mapping[str, Tensor], whole: Tensor, runs: list[list[str]]) -> None:
        """Use the flat tensor ``whole`` as the memory of the sum. Divide it into tensors with the names and shapes of ``like``."""
        pieces = whole.split([tensor.numel() for tensor in like.values()])
        self.tensors = {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}
        self._whole, self._runs = whole, runs


def _runs(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Group the names, in order: a large tensor alone; neighbouring small tensors of one dtype together, up to ``BLOCK`` values."""
    runs, last, size = list[list[str]](), None, BLOCK
    for name, tensor in tensors.items():
        kind = (tensor.dtype, tensor.device) if tensor.numel() <= SMALL else None
        if kind is None or kind != last or size + tensor.numel() > BLOCK:
            runs.append([])
            size = 0
        runs[-1].append(name)
        last, size = kind, size + tensor.numel()
    return runs


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of ``tensors``, one after the other, in a tensor of one axis."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    if len(flat) == 1:
        return flat[0]
    return torch.cat(flat if len({tensor.dtype for tensor in flat}) == 1 else [tensor.to(F64) for tensor in flat])
