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


def deviations(moments: Moments, reference: Running) -> tuple[Tensor, Tensor]:
    """Compute deviations from the reference, with mean r and deviation s (``scale``).

    ``first`` is the mean of ``(x - r) / s``, ``second`` that of ``((x - r) / s)^2 -
    1``, both (C,), float64. They are zeros at count 0, because the layer did not
    run.
    """
    if moments.count == 0:
        zeros = torch.zeros_like(reference.mean, dtype=torch.float64)
        return zeros, zeros.clone()
    s = scale(reference)
    first = (moments.mean.double() - reference.mean.double()) / s
    return first, moments.var.double() / s.square() + first.square() - 1


def from_deviations(count: int, first: Tensor, second: Tensor, reference: Running) -> tuple[Moments, int]:
    """Compute the moments of ``count`` values per channel from averages of deviations.

    Rounding, clipping or noise may make a variance negative. It is then set to 0.

    Returns:
        The moments, and how many channels' variance was set to 0.
    """
    s = scale(reference)
    var = second + 1 - first.square()
    return Moments(count, reference.mean.double() + s * first, s.square() * var.clamp(min=0.0)), int((var < 0).sum())


def running_deviations(running: Running, reference: Running) -> tuple[Tensor, Tensor]:
    """Compute ``(mean - r) / s`` and ``var / s^2 - 1``, (C,) each.

    They are for methods that average running means and variances separately
    (FedAvg).
    """
    s = scale(reference)
    return (running.mean.double() - reference.mean.double()) / s, running.var.double() / s.square() - 1


def from_running_deviations(mean: Tensor, var: Tensor, reference: Running) -> tuple[Running, int]:
    """Compute running statistics from averages of ``running_deviations``.

    Returns:
        The statistics, and how many channels' negative variance was set to 0.
    """
    s = scale(reference)
    return Running(reference.mean.double() + s * mean, s.square() * (var + 1).clamp(min=0.0)), int((var + 1 < 0).sum())


def within(first: Tensor, second: Tensor, limit: float) -> tuple[Tensor, Tensor, int]:
    """Bring ``deviations``, (C,) each, into a quantiser's range ``[-limit, limit]``.

    Returns:
        The new ``first``, the new ``second`` divided by ``limit`` (both in range if
        ``limit`` is at least 1), and how many channels' moments were changed.
    """
    kept = first.clamp(-limit, limit)
    var = (second + 1 - first.square()).clamp(min=0.0)
    ratio = torch.minimum(var, limit**2 + 1 - kept.square())
    cut = int(((kept != first) | (ratio < var)).sum())
    return kept, (ratio + kept.square() - 1) / limit, cut


def running_within(mean: Tensor, var: Tensor, limit: float) -> tuple[Tensor, Tensor, int]:
    """Bring ``running_deviations``, each separately, into a quantiser's range."""
    kept, ratio = mean.clamp(-limit, limit), var.clamp(max=limit**2)
    return kept, ratio / limit, int(((kept != mean) | (ratio != var)).sum())


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
    _, var = moments_error(first, reference, error, limit)
    tolerance = max(1e-3, 4 * limit * error)
    return int((var > tolerance * (moments.var + EPS)).sum())


def level(clipping_range: float, bits: int) -> float:
    """Return the level's width in a quantiser of ``[-clipping_range, clipping_range]``."""
    return 2 * clipping_range / (1 << bits)


def average_error(clipping_range: float, bits: int, weights: Sequence[float], heaviest: float = 0.0) -> float:
    """Return the worst-case absolute error of a quantised average, in its values' units.

    Each of n clients sends ``weight / heaviest`` times its value, with an error
    below one level. The sum is divided by ``sum(weights) / heaviest``. The
    average's error is below ``n * level * heaviest / sum(weights)``, one level for
    equal weights.

    Args:
        clipping_range: the quantiser's range is ``[-clipping_range,
            clipping_range]``.
        bits: of the quantiser.
        weights: one weight per client, above 0.
        heaviest: the public divisor of weights. 0: the largest of them.

    Raises:
        ValueError: ``weights`` is empty, or the sum is not positive.
    """
    total = sum(weights)
    if not weights or total <= 0:
        raise ValueError(f"an average needs positive weights, but got {list(weights)}")
    return len(weights) * level(clipping_range, bits) * (heaviest or max(weights)) / total


def moments_error(first: Tensor, reference: Running, error: float, limit: float) -> tuple[Tensor, Tensor]:
    """Return the largest errors (C,) of ``from_deviations``'s mean and variance.

    ``error`` is the largest of the averages of ``first`` and ``second / limit``.
    """
    s = scale(reference)
    return s * error, s.square() * error * (limit + 2 * first.abs() + error)


def beyond(named: Mapping[str, Tensor], limit: float) -> dict[str, int]:
    """Count the values, by tensor, that ``[-limit, limit]`` would cut off."""
    counts = {name: int((tensor.abs() > limit).sum()) for name, tensor in named.items()}
    return {name: count for name, count in counts.items() if count}
