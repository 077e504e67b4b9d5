"""Compute moments (count, mean and variance per channel), and combine them by rules.

FBN's Algorithm 2 is ``ema(shared, pool(moments of training batches), momentum)``. HBN's equations 8 and 11
are so, too, with the moments of a pass before training. ``plain_average`` is the negative control.

A batch's moments have the dtype of its activations, float32 at least. All else is computed in float64.
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
"""A function ``(values (n, d), counts (n,)) -> (d,)`` that combines the values of n clients into one vector."""


def weighted_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Average ``values`` (n, d) over n, with weights proportional to ``counts`` (n,)."""
    weights = counts.to(values.dtype) / counts.sum()
    return (weights[:, None] * values).sum(0)


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest absolute mean and variance that a client may report in ``dtype``.

    The squared distance of two clients' means, which is in the pooled variance, then does not overflow.
    """
    largest = torch.finfo(dtype).max
    return math.sqrt(largest) / 4, largest / 2


def ordinary(x: T) -> T:
    """Return a tensor of a subclass (MONAI's ``MetaTensor``) as torch's own, all else unchanged.

    Subclasses may handle a batch's metadata in every operation, and statistics have none. Those with their own
    ``__torch_dispatch__`` (DTensor, tensors of a trace) stay.
    """
    if type(x) is Tensor or not isinstance(x, Tensor) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return x
    return x.as_subclass(Tensor)  # type: ignore[return-value]


class Running(NamedTuple):
    """Hold the running statistics of a layer, with which it normalises in evaluation.

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
    """Compute mean (C,) and biased variance (C,) of a batch's channels. Gradients flow through both.

    On a CPU, the mean and then the centred squares are several times faster than ``torch.var_mean`` and the
    kernel of ``F.batch_norm``, without the cancellation of ``E[x^2] - E[x]^2``.

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
    """Hold the count, mean and biased variance of one layer's input, per channel.

    Attributes:
        count: number of values per channel, B * H * W for images.
        mean: (C,), float64.
        var: (C,), float64, biased: the sum of squares is divided by ``count``.
    """

    count: int
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Compute the moments of one batch ``x`` (B, C, *) over all dimensions but the channels."""
        mean, var = channel_moments(x.detach())
        return cls(x.numel() // x.shape[1], mean.double(), var.double())

    def to(self, device: torch.device) -> Moments:
        """Copy the moments to ``device``."""
        return Moments(self.count, self.mean.to(device), self.var.to(device))

    def bessel(self) -> Tensor:
        """Return the unbiased variance (C,). There are at least two values per channel."""
        return self.var * (self.count / (self.count - 1))


def stack(parts: Sequence[Moments]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack means (n, C), variances (n, C) and counts (n,) in float64, without parts of count 0."""
    parts = [part for part in parts if part.count > 0]
    counts = torch.tensor([part.count for part in parts], dtype=torch.float64, device=parts[0].mean.device)
    return torch.stack([p.mean for p in parts]).double(), torch.stack([p.var for p in parts]).double(), counts


def pool(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Compute the moments of the union of the data from which ``parts`` were computed.

    By the law of total variance, the variance is the average over the parts of ``var + (mean - common mean)^2``.
    With the default ``average``, this is exact, associative and commutative, up to rounding. A robust ``average``
    replaces the averages of both mean and variance (FBN, section 5).

    Args:
        parts: moments of disjoint data, one entry per batch or client.
        average: the rule that combines n values. The default weights them by count.

    References:
        Chan, Golub, LeVeque 1979; FBN, appendix A.
    """
    means, variances, counts = stack(parts)
    mean = average(means, counts)
    var = average(variances + (means - mean).square(), counts)
    return Moments(sum(part.count for part in parts), mean, var)


def plain_average(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Average means and, separately, variances, as FedAvg does. The arguments are those of ``pool``.

    The result ignores the spread of the parts' means, so its variance is too small if the means differ.
    """
    means, variances, counts = stack(parts)
    return Moments(sum(part.count for part in parts), average(means, counts), average(variances, counts))


def ema(shared: Running, new: Moments, momentum: float) -> Running:
    """Return ``(1 - momentum) * shared + momentum * new`` in float64, as BatchNorm updates statistics.

    Args:
        shared: the running statistics before.
        new: the observation, of at least two values per channel. Its unbiased variance is taken.
        momentum: weight of the *new* observation, as in torch, from 0 to 1.
    """
    return Running(
        (1 - momentum) * shared.mean.double() + momentum * new.mean,
        (1 - momentum) * shared.var.double() + momentum * new.bessel(),
    )
