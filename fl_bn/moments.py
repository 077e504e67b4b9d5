"""Moments: the one sufficient statistic under every method, and the two rules that combine it.

``pool`` is the law of total variance, ``ema`` the running update of BatchNorm. FBN's Algorithm 2 is
``ema(shared, pool(moments of the training batches), momentum)``; HBN's equations 8 and 11 are the same line with the
moments of a pass before training. ``plain_average`` is what FedAvg does instead: it forgets the spread of the
clients' means, and is kept as the baseline and as the negative control of every exactness test.

A batch is measured in the dtype of the activations, in float32 at least; whatever combines batches or clients is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Average = Callable[[Tensor, Tensor], Tensor]
"""``(values (n, d), counts (n,)) -> (d,)``: how the values of n clients become one."""


def weighted_mean(values: Tensor, counts: Tensor) -> Tensor:
    """Mean of ``values`` (n, d) with weights proportional to ``counts`` (n,)."""
    weights = counts.to(values.dtype) / counts.sum()
    return (weights[:, None] * values).sum(0)


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The largest mean (as +-), and the largest variance, that a client's report in ``dtype`` may hold.

    Within them the variance of two clients' union, which has the distance of their means squared, does not overflow in ``dtype``.
    """
    largest = torch.finfo(dtype).max
    return math.sqrt(largest) / 4, largest / 2


class Running(NamedTuple):
    """Running statistics of one layer: what inference normalises with. Both (C,); ``var`` is unbiased, as in torch."""

    mean: Tensor
    var: Tensor


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of ``x`` (B, C, *), both (C,), differentiable, at least float32.

    Two passes (mean, then centred squares): on a CPU several times faster than ``torch.var_mean`` and than the
    kernel inside ``F.batch_norm``, and free of the cancellation of E[x^2] - E[x]^2.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    dims = [0, *range(2, x.dim())]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    looked_into = centred.requires_grad or torch._C._are_functorch_transforms_active()
    squares = centred.square() if looked_into else centred.square_()  # in place: new memory costs more than the arithmetic
    return mean.flatten(), squares.mean(dims)


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and biased variance of one layer's input, per channel.

    ``count`` is the number of activations per channel (B * H * W), ``mean`` and ``var`` are (C,) in float64.
    """

    count: int
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Moments:
        """Moments of a batch ``x`` (B, C, *): channels at dimension 1, all the others are summed over."""
        if x.dim() < 2 or x.numel() == 0:
            raise ValueError(f"Moments.of needs a non-empty batch (B, C, *), but got shape {tuple(x.shape)}")
        mean, var = channel_moments(x.detach())
        return cls(x.numel() // x.shape[1], mean.double(), var.double())

    def to(self, device: torch.device) -> Moments:
        return Moments(self.count, self.mean.to(device), self.var.to(device))

    def bessel(self) -> Tensor:
        """The unbiased variance, ``var * count / (count - 1)``. Raises ValueError for fewer than two values."""
        if self.count < 2:
            raise ValueError(f"an unbiased variance needs at least 2 values per channel, but got {self.count}")
        return self.var * (self.count / (self.count - 1))


def stack(parts: Sequence[Moments]) -> tuple[Tensor, Tensor, Tensor]:
    """``(means (n, C), variances (n, C), counts (n,))`` of the parts that counted anything, in float64."""
    parts = [part for part in parts if part.count > 0]
    if not parts:
        raise ValueError("no moments to combine: every part has count 0")
    counts = torch.tensor([part.count for part in parts], dtype=torch.float64, device=parts[0].mean.device)
    return torch.stack([p.mean for p in parts]).double(), torch.stack([p.var for p in parts]).double(), counts


def pool(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Moments of the union of the data behind ``parts``: exact, associative and commutative (up to rounding).

    Law of total variance: the spread of the parts' means about the common one is added to their own variances.
    With a robust ``average`` the deviations are taken of the *raw* means about the robust one (FBN, section 5).

    Raises:
        ValueError: no part has a positive count.

    Reference: Chan, Golub, LeVeque 1979; FBN, appendix A.
    """
    means, variances, counts = stack(parts)
    mean = average(means, counts)
    var = average(variances + (means - mean).square(), counts)
    return Moments(sum(part.count for part in parts), mean, var)


def plain_average(parts: Sequence[Moments], average: Average = weighted_mean) -> Moments:
    """Average the means and, separately, the variances: FedAvg's rule. It forgets how far apart the means are."""
    means, variances, counts = stack(parts)
    return Moments(sum(part.count for part in parts), average(means, counts), average(variances, counts))


def ema(shared: Running, new: Moments, momentum: float) -> Running:
    """Running statistics after observing ``new``: ``(1 - momentum) * shared + momentum * new``, unbiased variance.

    ``momentum`` is torch's: the weight of the *new* observation. Returns float64.
    """
    return Running(
        (1 - momentum) * shared.mean.double() + momentum * new.mean,
        (1 - momentum) * shared.var.double() + momentum * new.bessel(),
    )
