"""Convert moments into numbers that secure aggregation can average.

Count, mean and biased variance of a layer cannot be averaged: pooling needs every
client's mean. So each client computes two deviations from a public reference, the
running statistics from the server, with mean r and standard deviation s = sqrt(var
+ EPS)::

    first  = mean of (x - r) / s            second = mean of ((x - r) / s)^2 - 1

Both have no unit, and are 0 for the reference's moments. Their averages, weighted
by counts, are the deviations of the union. So ``mean = r + s * first`` and ``var =
s^2 * (second + 1 - first^2)`` are exactly the pooled moments (law of total
variance).

A quantiser needs values in [-range, range]. ``within`` replaces deviations outside
by those of the nearest moments that fit, so the average still gives valid moments.
``second``, a square, is divided by the range.

``second + 1 - first^2`` loses digits if the reference is far from the data. An
error e of both numbers changes the variance by up to ``e * (range + 2 |first| +
e)`` s^2, perhaps a large part of it. A second exchange, with the first's result as
reference, restores the digits (see ``lost``).

Symbols: C -> channels, e -> error of an average in standardised units, L -> levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_bn.bn.moments import Moments, Running

EPS = 1e-5  # added to the reference's variance, so that a dead channel has a scale, too


def scale(reference: Running) -> Tensor:
    """Return the reference's standard deviation (C,), float64, above 0."""
    return (reference.var.double() + EPS).sqrt()


def deviations(own: Running | Moments, reference: Running, pooled: bool) -> tuple[Tensor, Tensor]:
    """Compute deviations from the reference, with mean r and deviation s (``scale``).

    Args:
        own: a mean and a variance.
        reference: the public statistics.
        pooled: whether the average is to give pooled moments. ``second`` is then
            as above. Otherwise it is ``var / s^2 - 1``, for methods that average
            running means and variances separately (FedAvg).

    Returns:
        ``first`` and ``second``, (C,) each, float64.
    """
    s = scale(reference)
    first = (own.mean.double() - reference.mean.double()) / s
    return first, own.var.double() / s.square() + pooled * first.square() - 1


def from_deviations(first: Tensor, second: Tensor, reference: Running, pooled: bool) -> tuple[Running, int]:
    """Compute mean and variance from averages of ``deviations``.

    Rounding, clipping or noise may make a variance negative. It is then set to 0.

    Returns:
        Mean and variance, and how many channels' variance was set to 0.
    """
    s = scale(reference)
    var = second + 1 - pooled * first.square()
    return Running(reference.mean.double() + s * first, s.square() * var.clamp(min=0.0)), int((var < 0).sum())


def within(first: Tensor, second: Tensor, limit: float, pooled: bool) -> tuple[Tensor, Tensor, int]:
    """Bring ``deviations``, (C,) each, into a quantiser's range ``[-limit, limit]``.

    Returns:
        The new ``first``, the new ``second`` divided by ``limit`` (both in range if
        ``limit`` is at least 1), and how many channels' moments were changed.
    """
    kept = first.clamp(-limit, limit)
    var = (second + 1 - pooled * first.square()).clamp(min=0.0)
    ratio = torch.minimum(var, limit**2 + 1 - pooled * kept.square())
    cut = int(((kept != first) | (ratio < var)).sum())
    return kept, (ratio + pooled * kept.square() - 1) / limit, cut


def lost(moments: Moments, first: Tensor, reference: Running, error: float, limit: float) -> int:
    """Count the channels whose variance is inexact, as the reference is too far from the data.

    Rounding may change such a variance (plus EPS) by more than 0.1 %, and by more
    than about four times what it causes with a reference near the data.

    Args:
        moments: of all clients together, from ``from_deviations``.
        first: (C,), the average from which they were computed.
        reference: the public statistics.
        error: the largest error of an average.
        limit: the quantiser's range is ``[-limit, limit]``.
    """
    var = scale(reference).square() * error * (limit + 2 * first.abs() + error)
    tolerance = max(1e-3, 4 * limit * error)
    return int((var > tolerance * (moments.var + EPS)).sum())


def average_error(clipping_range: float, bits: int, weights: Sequence[float]) -> float:
    """Return the worst-case absolute error of a quantised average, in its values' units.

    Each of n clients sends its weight, at most 1, times its value, with an error
    below one of the quantiser's ``1 << bits`` levels. The sum is divided by that of
    the weights. For equal weights, the average's error is below one level.
    """
    return len(weights) * 2 * clipping_range / (1 << bits) / sum(weights)


def beyond(named: Mapping[str, Tensor], limit: float) -> dict[str, int]:
    """Count the values, by tensor, that ``[-limit, limit]`` would cut off."""
    counts = {name: int((tensor.abs() > limit).sum()) for name, tensor in named.items()}
    return {name: count for name, count in counts.items() if count}
