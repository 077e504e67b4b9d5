"""Compute what a server needs for a round, in plain torch: average weights, combine statistics, make the pseudo-gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.blocks import WeightedSum
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.payload import Named
from fl_bn.methods import LayerReports


def average(parts: Sequence[Named], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return name -> the weighted mean of the clients' tensors, in float64. Clients are added in the given order.

    Raises:
        ValueError: There are no parts, or their total weight is not positive.
    """
    total = float(sum(weights))
    if not parts or total <= 0:
        raise ValueError(f"an average needs at least 1 reply and a total weight > 0, but got {len(parts)} replies of total weight {total}")
    mean = WeightedSum()
    mean.add(parts, [float(weight) / total for weight in weights])
    return mean.tensors


NO_SCALES: Mapping[str, float] = MappingProxyType({})


def combine(
    rule: Callable[[LayerReports], Running],
    shared: Mapping[str, Running],
    reports: Sequence[Mapping[str, Moments]],
    steps: Sequence[int],
    layers: Mapping[str, _BatchNorm],
    defence: Defence = NO_DEFENCE,
    pace: float = 1.0,
    scales: Mapping[str, float] = NO_SCALES,
) -> dict[str, Running]:
    """Combine the clients' moments into new shared statistics of each layer, in float64.

    A layer keeps its statistics if the clients' moments have fewer than two values per channel in total.

    Args:
        rule: The method's rule for one layer.
        shared: Layer -> the shared statistics before the round.
        reports: Each client's moments by layer, in the order of the clients.
        steps: Each client's number of training batches, in the same order.
        layers: Layer -> its module, whose momentum the rule may use.
        defence: The defence against Byzantine clients.
        pace: The round's learning rate divided by that of round 1.
        scales: Layer -> the standard deviation that the server gave the layer's input before round 1, by rescaling
            weights. 1 for layers that are missing.
    """
    new = dict(shared)
    if defence.active:
        reports, steps = defence.believed(reports, steps)
    for name in shared:
        parts = [report[name] for report in reports if name in report]
        total = sum(part.count for part in parts)
        if total < 2:
            continue
        mean_steps = sum(report[name].count * step for report, step in zip(reports, steps, strict=True) if name in report) / total
        momentum = layers[name].momentum
        momentum, scale = 0.1 if momentum is None else momentum, scales.get(name, 1.0)
        new[name] = rule(LayerReports(shared[name], parts, momentum, mean_steps, defence.average, pace, scale))
    return new


def pseudo_gradient(weights: Named, mean: Named) -> dict[str, Tensor]:
    """Return ``weights - average`` in float64, with the average rounded to the dtype of the weights.

    The rounding makes the difference exact: ``weights`` minus the pseudo-gradient is the rounded average, bit for bit.
    Without rounding, a step of SGD with learning rate 1 could end at a float32 number next to the rounded average. This happens
    to one value in 40 if two clients are averaged in the ratio 3 to 7.
    """
    return {name: difference(weights[name].double(), mean[name].clone(), weights[name].dtype) for name in mean}


def difference(weight: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight - mean``, the pseudo-gradient of one tensor or of a block of it, in the memory of ``mean``.

    Args:
        weight: The weight before the round, in float64.
        mean: The average, in float64. It is overwritten.
        dtype: The dtype of the stored weights, to which the average is rounded first.
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
        """Compare two sets of statistics. Return None if ``new`` is empty.

        Args:
            old: Layer -> statistics before the update.
            new: Layer -> statistics after the update.
            eps: Added to variances, so that no division is by 0.
        """
        if not new:
            return None
        moved = {k: float(((new[k].mean - old[k].mean).abs() / (old[k].var + eps).sqrt()).max()) for k in new}
        growth = max(float(new[k].var.mean() / (old[k].var.mean() + eps)) for k in new)
        layer = max(moved, key=lambda k: _extent(moved[k]))
        return cls(moved[layer], layer, min(float(running.var.min()) for running in new.values()), growth)


def _extent(value: float) -> tuple[bool, float]:
    """Return a key for ``max`` that makes NaN the largest value. Without it, ``max`` could ignore NaN."""
    return math.isnan(value), value


def merge_drifts(drifts: Iterable[Drift]) -> Drift | None:
    """Merge the drifts of several clients into one with the most extreme value of each number. If ``drifts`` is empty, return None."""
    drifts = list(drifts)
    if not drifts:
        return None
    worst = max(drifts, key=lambda d: _extent(d.largest))
    return Drift(worst.largest, worst.layer, min(d.min_var for d in drifts), max(d.growth for d in drifts))


def running_statistics(model: nn.Module, of: Collection[str] | None = None) -> dict[str, Running]:
    """Return layer -> a copy of its running statistics on the CPU, for the layers ``of`` that have some. None: all BatchNorm layers."""
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
