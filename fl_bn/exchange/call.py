"""The call under FedTAN: ``exchange(key, local, count) -> averaged over the cohort``, whoever carries it.

Algorithms 2 and 3 of the paper are one operation, *average over the cohort*, applied to the moments in the forward pass and to
the pair of gradients in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ExchangeFailed(RuntimeError):
    """The exchange of this round cannot go on; the message says why. Nothing of the round may be used."""


class Refused(ValueError):
    """A request is not what the session expects of this client; the message says what was expected and what came."""


class Quantity(Enum):
    """The kind of a vector. It decides the length, for a layer of C channels, and the weights of the average."""

    MEAN = "mean"  # C; weighted by activations
    VARIANCE = "variance"  # C, about the cohort's mean; weighted by activations
    MOMENTS = "moments"  # 2C, mean and biased variance about the own mean: pooled
    GRADIENTS = "gradients"  # 2C, of the mean and of the variance; weighted by batch sizes
    STATISTICS = "statistics"  # 2C, moments as above; pooled, and the variance of the answer is unbiased: running statistics

    def width(self, channels: int) -> int:
        return channels * (1 if self in (Quantity.MEAN, Quantity.VARIANCE) else 2)


class Key(NamedTuple):
    """Which exchange: the layer's name, the quantity, and how often the layer was called before in this forward pass."""

    layer: str
    quantity: Quantity
    call: int = 0

    def __str__(self) -> str:
        """For the log: what a client sent as a name neither fills it nor breaks its lines."""
        name = self.layer if self.layer.isprintable() and len(self.layer) <= 80 else repr(self.layer[:60]) + " ..."
        return f"{name or 'the model'} ({self.quantity.value}{f', call {self.call + 1}' if self.call else ''})"


@dataclass(frozen=True)
class Join:
    """A client's first request: the size of the batch it drew, 0 to sit the round out."""

    batch: int


@dataclass(frozen=True)
class Local:
    """A client's own values (d,), of ``count`` activations per channel."""

    key: Key
    values: Tensor
    count: int


Request = Join | Local


@dataclass(frozen=True, eq=False)
class Answer:
    """The cohort's values (d,), its activations per channel and its samples. After a ``Join``: no values, count 0."""

    values: Tensor
    count: int
    batch: int


def checked(answer: Answer, key: Key, local: Tensor) -> Answer:
    """``answer``, if it is one to a client's own values ``local`` (d,) of ``key``.

    Raises:
        ExchangeFailed: it has another shape or dtype, or counts nobody.
    """
    shape, dtype = tuple(answer.values.shape), answer.values.dtype
    if (shape, dtype) != (tuple(local.shape), local.dtype):
        raise ExchangeFailed(f"{key}: expected an answer of shape {tuple(local.shape)} and {local.dtype}, but got {shape} and {dtype}")
    if answer.count < 1 or answer.batch < 1:
        raise ExchangeFailed(f"{key}: expected an answer of somebody, but it counts {answer.count} activations and {answer.batch} samples")
    return answer


class Layer(NamedTuple):
    """A layer as the server knows it: its number of channels, and the dtype in which its vectors travel."""

    channels: int
    dtype: torch.dtype


class Exchange(Protocol):
    """One client's side of a round's exchange. ``batch``: the samples it announced; ``seconds``: spent waiting so far."""

    batch: int
    seconds: float

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` (d,) over the cohort; blocks until all have sent theirs.

        Raises:
            ExchangeFailed: the round's exchange was given up.
        """

    def close(self, error: str = "") -> None:
        """Leave the round: in good order, or because of ``error``, which drops this client. Does nothing the second time."""
