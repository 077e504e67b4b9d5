"""Compute a server's round in plain torch: look at values, average weights, combine statistics.

Large tensors are processed in blocks that fit into the cache, and no whole tensor is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.moments import Moments, Running, weighted_mean
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.defence import Defence
from fl_bn.federation.values import Named
from fl_bn.methods import LayerReports

BLOCK = 1 << 17  # values; 1 MB of float64
F64 = torch.float64

dtype_name = lru_cache(str)  # NumPy computes the name anew each time


def extremes(array: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest value of a non-empty array in one pass; NaN if one is NaN."""
    least, most = torch.aminmax(torch.from_numpy(array))
    return least.item(), most.item()


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value of the finite floating-point tensors; 0 without any."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return max((abs(end.item()) for tensor in floats for end in torch.aminmax(tensor)), default=0.0)


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether all values stay finite when they are stored in ``dtype``."""
    if not dtype.is_floating_point or not tensor.numel():
        return True
    blocks = tensor.reshape(-1).split(BLOCK)
    return all(math.isfinite(end.item()) for block in blocks for end in torch.aminmax(block.to(dtype)))


class WeightedSum:
    """Sum named tensors, each times its weight, in float64, in the order of ``add``.

    Large tensors are added block by block, without a float64 copy, which changes no bit. ``total`` sums the weights.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._like: Named = {}
        self._whole = torch.empty(0)

    def add(self, part: Named, weight: float) -> None:
        """Add ``weight * part`` (name -> tensor). The first part gives the sum its names."""
        if not self._like:
            # Freed memory returns to the operating system at once if it is one large piece, but not if it is many small ones.
            self._whole = torch.from_numpy(np.zeros(sum(tensor.numel() for tensor in part.values())))
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in part.items()}
        self.total += weight
        copy = torch.empty(BLOCK, dtype=F64)
        for name, sums in self._pieces().items():
            for few, piece in zip(sums.split(BLOCK), part[name].reshape(-1).split(BLOCK), strict=True):
                few.add_(copy[: piece.numel()].copy_(piece), alpha=weight)

    def mean(self) -> dict[str, Tensor]:
        """Return name -> the weighted mean. It takes the memory of the sum, which is over."""
        self._whole.div_(self.total)
        mean = {name: piece.view(self._like[name].shape) for name, piece in self._pieces().items()}
        self._whole = torch.empty(0)
        return mean

    def _pieces(self) -> dict[str, Tensor]:
        pieces = self._whole.split([tensor.numel() for tensor in self._like.values()])
        return dict(zip(self._like, pieces, strict=True))


def average(parts: Sequence[Named], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return name -> the weighted mean of the clients' tensors, in float64, in the given order."""
    mean = WeightedSum()
    for part, weight in zip(parts, weights, strict=True):
        mean.add(part, float(weight))
    return mean.mean()


def combine(
    rule: Callable[[LayerReports], Running],
    shared: Mapping[str, Running],
    reports: Sequence[Mapping[str, Moments]],
    steps: Sequence[int],
    layers: Mapping[str, _BatchNorm],
    defence: Defence | None = None,
    pace: float = 1.0,
    scales: Mapping[str, float] | None = None,
) -> dict[str, Running]:
    """Combine the clients' moments into new shared statistics per layer, in float64.

    A layer keeps its statistics if the clients' moments have fewer than two values per channel in total. ``pace``
    is the round's learning rate over that of round 1. ``scales`` is layer -> the standard deviation that the
    server gave the layer's input before round 1, by rescaling weights; 1 for others.
    """
    new = dict(shared)
    average = weighted_mean if defence is None else defence.average
    if defence is not None and defence.active:
        reports, steps = defence.believed(reports, steps)
    for name in shared:
        parts = [report[name] for report in reports if name in report]
        total = sum(part.count for part in parts)
        if total < 2:
            continue
        mean_steps = sum(report[name].count * step for report, step in zip(reports, steps, strict=True) if name in report) / total
        momentum = layers[name].momentum
        momentum, scale = 0.1 if momentum is None else momentum, (scales or {}).get(name, 1.0)
        new[name] = rule(LayerReports(shared[name], parts, momentum, mean_steps, average, pace, scale))
    return new


def difference(weight: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pseudo-gradient ``weight - mean`` of a tensor or block, in the memory of ``mean``.

    The average is first rounded to ``dtype``, that of the stored weights. So the weight minus the pseudo-gradient
    is the rounded average, bit for bit. Otherwise a step of SGD with learning rate 1 could end at the next
    float32: for one value in 40, if two clients are averaged in the ratio 3 to 7.
    """
    return torch.sub(weight, mean.copy_(mean.to(dtype)), out=mean)


@dataclass(frozen=True)
class Drift:
    """Describe how far the statistics moved when they were updated once.

    Attributes:
        largest: The largest absolute change of a running mean, over all channels and layers. The unit is the channel's
            standard deviation by the old statistics.
        layer: The name of the layer with this change.
        min_var: The smallest of the new running variances.
        growth: The factor by which the running variances grew, in the layer with the largest factor. A layer's factor is
            the mean of its new running variances over the channels, divided by the mean of its old ones.
    """

    largest: float
    layer: str
    min_var: float
    growth: float

    @classmethod
    def between(cls, old: Mapping[str, Running], new: Mapping[str, Running], eps: float = 1e-5) -> Drift | None:
        """Compare two sets of statistics, ``eps`` added to variances; None if ``new`` is empty."""
        if not new:
            return None
        moved = {k: float(((new[k].mean - old[k].mean).abs() / (old[k].var + eps).sqrt()).max()) for k in new}
        growth = max(float(new[k].var.mean() / (old[k].var.mean() + eps)) for k in new)
        layer = max(moved, key=lambda k: _extent(moved[k]))
        return cls(moved[layer], layer, min(float(running.var.min()) for running in new.values()), growth)


def _extent(value: float) -> tuple[bool, float]:
    """Return a key for ``max`` that makes NaN the largest value, which it could ignore."""
    return math.isnan(value), value


def running_statistics(model: nn.Module, of: Collection[str] | None = None) -> dict[str, Running]:
    """Return layer -> a CPU copy of its running statistics, for layers ``of`` (None: all) with some."""
    return {
        name: Running(layer.running_mean.detach().cpu().clone(), layer.running_var.detach().cpu().clone())
        for name, layer in batch_norms(model).items()
        if (of is None or name in of) and layer.running_mean is not None and layer.running_var is not None
    }


@torch.no_grad()
def store_statistics(model: nn.Module, statistics: Mapping[str, Running]) -> None:
    """Set the running statistics of layers of ``model``, in place: layer -> statistics."""
    for name, running in statistics.items():
        layer = model.get_submodule(name)
        layer.get_buffer("running_mean").copy_(running.mean)
        layer.get_buffer("running_var").copy_(running.var)
