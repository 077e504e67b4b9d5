"""Define FedTAN's operation: ``exchange(key, local, count)`` averages over the cohort.

Algorithms 2 and 3 of FedTAN's paper average moments of a layer's input in the
forward pass, and gradients with respect to these moments in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fl_bn.bn.moments import bounds
from fl_bn.support.wire import printable


class ExchangeFailed(RuntimeError):
    """Signal that the round's exchange cannot go on, so no result of the round may be used."""


class Refused(ValueError):
    """Signal that the server refuses a client's request."""


class Quantity(Enum):
    """Name the kinds of vectors that clients average."""

    MEAN = "mean"  # (C,) means, averaged with the numbers of activations as weights
    VARIANCE = "variance"  # (C,) variances about the cohort's mean, averaged in the same way
    MOMENTS = "moments"  # (2C,) each client's means and biased variances, pooled
    GRADIENTS = "gradients"  # (2C,) gradients with respect to mean and variance, weighted by batch sizes
    STATISTICS = "statistics"  # like MOMENTS, but the answer has the unbiased variance, as running statistics do

    def width(self, channels: int) -> int:
        """Return the length of the vector for a layer of ``channels`` channels."""
        return channels * (1 if self in (Quantity.MEAN, Quantity.VARIANCE) else 2)

    def ranges(self, values: Tensor, layer: Layer) -> Iterator[tuple[str, Tensor, float, float]]:
        """Yield a vector's parts: name, values, and limits within which averages stay finite."""
        largest_mean, largest_variance = bounds(layer.dtype)
        end = {Quantity.GRADIENTS: len(values), Quantity.VARIANCE: 0}.get(self, layer.channels)
        if end:
            yield "gradients" if self is Quantity.GRADIENTS else "means", values[:end], -largest_mean, largest_mean
        if end < len(values):
            yield "variances", values[end:], 0.0, largest_variance / 2  # an unbiased variance may be twice as large


class Key(NamedTuple):
    """Identify one exchange within a round.

    Attributes:
        call: how often the layer was called before in this forward pass.
    """

    layer: str
    quantity: Quantity
    call: int = 0

    def __str__(self) -> str:
        """Describe the exchange for the log, with long or unprintable names cut."""
        return f"{printable(self.layer) or 'the model'} ({self.quantity.value}{f', call {self.call + 1}' if self.call else ''})"


@dataclass(frozen=True)
class Join:
    """Ask to take part in the round with a ``batch`` of samples (0: not)."""

    batch: int


@dataclass(frozen=True)
class Local:
    """Send a client's vector ``values`` (d,), of ``count`` activations per channel."""

    key: Key
    values: Tensor
    count: int


Request = Join | Local


@dataclass(frozen=True, eq=False)
class Answer:
    """Hold the server's answer to a request; without ``values`` to a ``Join``.

    Attributes:
        values: the cohort's combined vector (d,).
        count: the cohort's activations per channel.
        batch: the cohort's samples.
    """

    values: Tensor
    count: int
    batch: int


def checked(answer: Answer, key: Key, local: Tensor) -> Answer:
    """Return ``answer`` if it fits the vector ``local``, or raise ``ExchangeFailed``."""
    actual, wanted = (tuple(answer.values.shape), answer.values.dtype), (tuple(local.shape), local.dtype)
    if actual != wanted:
        raise ExchangeFailed(f"{key}: expected an answer of shape {wanted[0]} and {wanted[1]}, but got shape {actual[0]} and {actual[1]}")
    if min(answer.count, answer.batch) < 1:
        raise ExchangeFailed(f"{key}: expected an answer about activations and samples, but got {answer.count} and {answer.batch} of them")
    return answer


class Layer(NamedTuple):
    """Hold what checks vectors of one layer. ``dtype`` is that in messages."""

    channels: int
    dtype: torch.dtype


class Exchange(Protocol):
    """Take part in a round's exchange as one client. Each carrier has its own class.

    Attributes:
        batch: the number of samples that the client announced.
        seconds: the time spent waiting for answers.
    """

    batch: int
    seconds: float

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` over the cohort, and wait until all clients have sent their vectors.

        ``local`` (d,) summarises ``count`` activations per channel.

        Raises:
            ExchangeFailed: the round's exchange cannot go on.
        """

    def close(self, error: str = "") -> None:
        """Leave the round, perhaps again. With an ``error``, the server drops this client."""
