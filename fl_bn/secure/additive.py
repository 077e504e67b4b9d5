"""Moments as plain averages: the form that a secure sum, and a clip, can do something with.

Count, mean and biased variance of one layer (``Moments``) are not additive: pooling needs every client's mean. About a public reference,
the running statistics that went down (mean r, standard deviation s = sqrt(var + EPS)), two deviations are::

    first  = mean of (x - r) / s            second = mean of ((x - r) / s)^2 - 1

Both are 0 where the client's data look as the reference says, have no unit, and their averages weighted by counts are those of the
union: ``mean = r + s * first`` and ``var = s^2 * (second + 1 - first^2)``, exactly the pooled moments (law of total variance).

A quantiser takes values in [-range, range]. ``within`` brings a client's deviations there: ``first`` as it is, ``second / range``, since it
is a square; what lies beyond is moved to the nearest moments that fit, so that a sum of cut moments is still moments of something.

Cancellation: ``second + 1 - first^2`` loses digits where ``|first|`` is large, that is, where the reference is far from the data: an
error e of both numbers sent moves the variance by up to ``e * (range + 2 |first| + e)`` s^2. Where s^2 is far above the variance, that is
much of it: a second exchange about what the first found is the cure (see ``lost``).

Symbols: C -> channels, e -> error of an average in standardised units, L -> levels of a quantiser of [-range, range].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_bn.moments import Moments, Running

EPS = 1e-5  # added to the reference's variance, so that a dead channel has a scale, too


def scale(reference: Running) -> Tensor:
    """Standard deviation (C,) of the reference, float64, never 0."""
    return (reference.var.double() + EPS).sqrt()


def deviations(moments: Moments, reference: Running) -> tuple[Tensor, Tensor]:
    """``(first, second)``, both (C,) in float64 and without a unit; zeros for a layer that did not run."""
    if moments.count == 0:
        zeros = torch.zeros_like(reference.mean, dtype=torch.float64)
        return zeros, zeros.clone()
    s = scale(reference)
    first = (moments.mean.double() - reference.mean.double()) / s
    return first, moments.var.double() / s.square() + first.square() - 1


def from_deviations(count: int, first: Tensor, second: Tensor, reference: Running) -> tuple[Moments, int]:
    """The moments behind averaged deviations, and the number of channels whose variance came out negative and was set to 0.

    Exact averages never do; rounded, clipped or noisy ones may, where the variance is below their error.
    """
    s = scale(reference)
    var = second + 1 - first.square()
    return Moments(count, reference.mean.double() + s * first, s.square() * var.clamp(min=0.0)), int((var < 0).sum())


def running_deviations(running: Running, reference: Running) -> tuple[Tensor, Tensor]:
    """``((mean - r) / s, var / s^2 - 1)`` (C,): for methods that average running statistics one by one (FedAvg)."""
    s = scale(reference)
    return (running.mean.double() - reference.mean.double()) / s, running.var.double() / s.square() - 1


def from_running_deviations(mean: Tensor, var: Tensor, reference: Running) -> tuple[Running, int]:
    """The inverse, and the number of channels whose variance came out negative and was set to 0."""
    s = scale(reference)
    return Running(reference.mean.double() + s * mean, s.square() * (var + 1).clamp(min=0.0)), int((var + 1 < 0).sum())


def within(first: Tensor, second: Tensor, limit: float) -> tuple[Tensor, Tensor, int]:
    """``(first, second / limit, cut)``, both in ``[-limit, limit]``; ``cut``: channels whose moments had to be changed for that."""
    kept = first.clamp(-limit, limit)
    var = (second + 1 - first.square()).clamp(min=0.0)
    ratio = torch.minimum(var, limit**2 + 1 - kept.square())
    cut = int(((kept != first) | (ratio < var)).sum())
    return kept, (ratio + kept.square() - 1) / limit, cut


def running_within(mean: Tensor, var: Tensor, limit: float) -> tuple[Tensor, Tensor, int]:
    """The same of running deviations, which are averaged apart."""
    kept, ratio = mean.clamp(-limit, limit), var.clamp(max=limit**2)
    return kept, ratio / limit, int(((kept != mean) | (ratio != var)).sum())


def lost(moments: Moments, first: Tensor, reference: Running, error: float, limit: float) -> int:
    """Channels whose variance may be off by more than 0.1 % of itself (plus EPS), and by much more than about a reference that is right."""
    _, var = moments_error(first, reference, error, limit)
    tolerance = max(1e-3, 4 * limit * error)
    return int((var > tolerance * (moments.var + EPS)).sum())


def level(clipping_range: float, bits: int) -> float:
    """Width of one level of a quantiser of ``[-clipping_range, clipping_range]`` with ``2**bits`` levels."""
    return 2 * clipping_range / (1 << bits)


def average_error(clipping_range: float, bits: int, weights: Sequence[float], heaviest: float = 0.0) -> float:
    """Worst-case absolute error of a quantised average, in the units of what is averaged.

    Each of n clients sends ``weight / heaviest`` times its value, rounded to a neighbouring level (less than one level off); the sum is
    exact in integers and divided by ``sum(weights) / heaviest``: less than ``n * level * heaviest / sum(weights)``; one level for equal
    weights. ``heaviest``: the public weight that stands for 1, by default the largest.
    """
    total = sum(weights)
    if not weights or total <= 0:
        raise ValueError(f"an average needs positive weights, but got {list(weights)}")
    return len(weights) * level(clipping_range, bits) * (heaviest or max(weights)) / total


def moments_error(first: Tensor, reference: Running, error: float, limit: float) -> tuple[Tensor, Tensor]:
    """Worst-case absolute errors (C,) of mean and variance where ``first`` and ``second / limit`` are off by up to ``error``."""
    s = scale(reference)
    return s * error, s.square() * error * (limit + 2 * first.abs() + error)


def beyond(named: Mapping[str, Tensor], limit: float) -> dict[str, int]:
    """How many values of each tensor a quantiser of ``[-limit, limit]`` would cut off, of those tensors that have any."""
    counts = {name: int((tensor.abs() > limit).sum()) for name, tensor in named.items()}
    return {name: count for name, count in counts.items() if count}
