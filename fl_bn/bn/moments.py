"""Compute moments (count, mean, variance per channel), and combine them.

FBN's Algorithm 2 is ``ema(shared, pool(moments of training batches), momentum)``.
HBN's equations 8 and 11 use the moments of a pass before training.
``plain_average`` is the negative control.

A batch's moments have its dtype, but at least float32. All else is computed in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")
Average = Callable[[Tensor, Tensor], Tensor]
"""A function ``(values (n, d), counts (n,)) -> (d,)`` that combines n clients' values."""


def weighted_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Average ``values`` (n, d) over n, weighted by ``counts`` (n,)."""
    weights = counts.to(values.dtype) / counts.sum()
    return (weights[:, None] * values).sum(0)


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest absolute mean and variance that a client may report.

    Then the squared distance of two means in the pooled variance does not overflow.
    """
    largest = torch.finfo(dtype).max
    return math.sqrt(largest) / 4, largest / 2


def ordinary(x: T) -> T:
    """Return a subclass's tensor (MONAI's ``MetaTensor``) as torch's own, all else unchanged.

    A subclass may handle a batch's metadata in every operation. Those with
    ``__torch_dispatch__`` (DTensor, traces) stay.
    """
    if type(x) is Tensor or not isinstance(x, Tensor) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)  # type: ignore[return-value]


class Running(NamedTuple):
    """Hold a layer's running statistics, with which it normalises in evaluation.

    Attributes:
        mean: (C,).
        var: (C,), unbiased, as in torch.
    """

    mean: Tensor
    var: Tensor


def inside_transform() -> bool:
    """Return whether ``torch.func``, forward-mode AD or ``torch.compile`` transforms the call."""
    return torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling() or forward_ad._current_level >= 0


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance (C,) of a batch. Gradients flow through both.

    On a CPU this is several times faster than ``torch.var_mean`` and
    ``F.batch_norm``, without the cancellation of ``E[x^2] - E[x]^2``.

    Args:
        x: a batch (B, C, *). Half precision is computed in float32.
    """
    x = ordinary(x)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    dims = [0, *range(2, x.dim())]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    differentiated = centred.requires_grad or torch._C._are_functorch_transforms_active()
    squares = centred.square() if differentiated else centred.square_()  # in place: allocating memory takes longer than the arithmetic
    return mean.flatten(), squares.mean(dims)


@dataclass(frozen=True, eq=False)
class Moments:
    """Hold count, mean and biased variance of a layer's input, per channel.

    Attributes:
        count: values per channel, B * H * W for images.
        mean: (C,), float64.
        var: (C,), float64, biased: divided by ``count``.
    """

    count: int
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Compute the moments of one batch ``x`` (B, C, *)."""
        mean, var = channel_moments(x.detach())
        return cls(x.numel() // x.shape[1], mean.double(), var.double())

    def to(self, device: torch.device) -> Moments:
        """Copy the moments to ``device``."""
        return Moments(self.count, self.mean.to(device), self.var.to(device))

    def bessel(self) -> Tensor:
        """Return the unbiased variance (C,), from at least two values per channel."""
        return self.var * (self.count / (self.count - 1))


def stack(parts: Sequence[Moments]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack means, variances (n, C) and counts (n,) in float64, without empty parts."""
    parts = [part for part in parts if part.count > 0]
    counts = torch.tensor([part.count for part in parts], dtype=torch.float64, device=parts[0].mean.device)
    return torch.stack([p.mean for p in parts]).double(), torch.stack([p.var for p in parts]).double(), counts


def pool(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Compute the moments of the union of the data of ``parts``.

    By the law of total variance, the variance is the average of ``var + (mean -
    common mean)^2``. With the default ``average``, this is exact up to rounding. A
    robust ``average`` replaces the averages of both mean and variance (FBN, section
    5).

    Args:
        parts: moments of disjoint data, such as clients'.
        average: combines n values, by default weighted by count.

    References:
        Chan, Golub, LeVeque 1979; FBN, appendix A.
    """
    means, variances, counts = stack(parts)
    mean = average(means, counts)
    var = average(variances + (means - mean).square(), counts)
    return Moments(sum(part.count for part in parts), mean, var)


def plain_average(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Average means and, separately, variances, as FedAvg does.

    Without the spread of the means, the variance is too small.
    """
    means, variances, counts = stack(parts)
    return Moments(sum(part.count for part in parts), average(means, counts), average(variances, counts))


def ema(shared: Running, new: Moments, momentum: float) -> Running:
    """Return ``(1 - momentum) * shared + momentum * new`` in float64.

    Args:
        shared: running statistics.
        new: the observation, at least two values per channel. Its unbiased variance
            is taken.
        momentum: weight of the *new* observation, from 0 to 1.
    """
    return Running(
        (1 - momentum) * shared.mean.double() + momentum * new.mean,
        (1 - momentum) * shared.var.double() + momentum * new.bessel(),
    )
