"""The server's half of a round, in plain torch: average the weights, combine the statistics, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.federation.blocks import WeightedSum
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.methods import LayerReports
from fl_bn.moments import Moments, Running
from fl_bn.roles import batch_norms

Named = Mapping[str, Tensor]


def average(parts: Sequence[Named], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of named tensors, accumulated in float64 in the order given; the result stays float64."""
    total = float(sum(weights))
    if not parts or total <= 0:
        raise ValueError(f"nothing to average: {len(parts)} parts with total weight {total}")
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
    """New shared statistics per layer by ``rule``, float64. A layer that no client ran in this round keeps its own.

    ``reports`` and ``steps`` (training batches) are per client, in partition order. ``pace`` and, by layer, ``scales``: see
    ``LayerReports``.
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
    """``weights - average``, float64, of the average rounded as the weights are stored.

    The difference is then exact, and a step of 1 along it is that average bit for bit. Of the unrounded one, a tie between two
    float32 numbers (one weight in 40 where two clients count 3 and 7) is decided anew by the rounding of the difference.
    """
    return {name: difference(weights[name].double(), mean[name].clone(), weights[name].dtype) for name in mean}


def difference(weight: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """``pseudo_gradient`` of one tensor, or of a piece of it, in the memory of ``mean``: both in float64, stored as ``dtype``."""
    return torch.sub(weight, mean.copy_(mean.to(dtype)), out=mean)


@dataclass(frozen=True)
class Drift:
    """How far one combination moved the shared statistics.

    ``largest``: largest change of a mean, in standard deviations of the old statistics; ``layer``: where; ``min_var``: smallest
    running variance; ``growth``: largest factor by which a layer's mean variance grew.
    """

    largest: float
    layer: str
    min_var: float
    growth: float

    @classmethod
    def between(cls, old: Mapping[str, Running], new: Mapping[str, Running], eps: float = 1e-5) -> Drift | None:
        """None where no statistics are shared."""
        if not new:
            return None
        moved = {k: float(((new[k].mean - old[k].mean).abs() / (old[k].var + eps).sqrt()).max()) for k in new}
        growth = max(float(new[k].var.mean() / (old[k].var.mean() + eps)) for k in new)
        layer = max(moved, key=lambda k: _extent(moved[k]))
        return cls(moved[layer], layer, min(float(running.var.min()) for running in new.values()), growth)


def _extent(value: float) -> tuple[bool, float]:
    """For ``max``, which would pass NaN over: here nothing is larger."""
    return math.isnan(value), value


def merge_drifts(drifts: Iterable[Drift]) -> Drift | None:
    """The most extreme of each figure, over clients whose statistics stay home."""
    drifts = list(drifts)
    if not drifts:
        return None
    worst = max(drifts, key=lambda d: _extent(d.largest))
    return Drift(worst.largest, worst.layer, min(d.min_var for d in drifts), max(d.growth for d in drifts))


def running_statistics(model: nn.Module) -> dict[str, Running]:
    """A copy of every BatchNorm layer's running statistics on the CPU; layers that keep none are left out."""
    return {
        name: Running(layer.running_mean.detach().cpu().clone(), layer.running_var.detach().cpu().clone())
        for name, layer in batch_norms(model).items()
        if layer.running_mean is not None and layer.running_var is not None
    }
