"""The call behind FedTAN, for all carriers: ``exchange(key, local, count)`` returns averages over the cohort.

Algorithms 2 and 3 of the paper are one operation, *average over the cohort*. The forward pass applies it to
the moments, the backward pass to the pair of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ExchangeFailed(RuntimeError):
    """The exchange of this round cannot go on, and no result of the round may be used. The message says why."""


class Refused(ValueError):
    """A request differs from what the session expects of this client. The message names both."""


class Quantity(Enum):
    """Kind of a vector. It decides the length, for a layer of C channels, and the weights of the average."""

    MEAN = "mean"  # C; weighted by activations
    VARIANCE = "variance"  # C, about the cohort's mean; weighted by activations
    MOMENTS = "moments"  # 2C, mean and biased variance about the own mean: pooled
    GRADIENTS = "gradients"  # 2C, of the mean and of the variance; weighted by batch sizes
    STATISTICS = "statistics"  # 2C, moments as above; pooled, and the variance of the answer is unbiased: running statistics

    def width(self, channels: int) -> int:
        """Return the length of the vector for a layer of ``channels`` channels."""
        return channels * (1 if self in (Quantity.MEAN, Quantity.VARIANCE) else 2)


class Key(NamedTuple):
    """Identity of one exchange.

    Attributes:
        layer: the layer's name.
        quantity: the kind of the vector.
        call: how often the layer was called before in this forward pass.
    """

    layer: str
    quantity: Quantity
    call: int = 0

    def __str__(self) -> str:
        """Describe the exchange in one short line of a log, whatever name a client sent."""
        name = self.layer if self.layer.isprintable() and len(self.layer) <= 80 else repr(self.layer[:60]) + " ..."
        return f"{name or 'the model'} ({self.quantity.value}{f', call {self.call + 1}' if self.call else ''})"


@dataclass(frozen=True)
class Join:
    """A client's first request.

    Attributes:
        batch: size of the batch that it drew; 0 to sit the round out.
    """

    batch: int


@dataclass(frozen=True)
class Local:
    """Ask for the cohort's average of a vector, and give this client's own vector.

    Attributes:
        key: says which vector it is: layer, quantity and call.
        values: this client's vector (d,).
        count: the number of activations per channel that ``values`` summarise.
    """

    key: Key
    values: Tensor
    count: int


Request = Join | Local


@dataclass(frozen=True, eq=False)
class Answer:
    """The cohort's values. The answer to a ``Join`` has no values and a count of 0.

    Attributes:
        values: (d,).
        count: activations per channel of the cohort.
        batch: samples of the cohort.
    """

    values: Tensor
    count: int
    batch: int


def checked(answer: Answer, key: Key, local: Tensor) -> Answer:
    """Return ``answer`` if it fits a client's own values.

    Args:
        answer: the answer.
        key: the exchange.
        local: the client's own values, (d,).

    Raises:
        ExchangeFailed: the answer has another shape or dtype, or counts no activations or samples.
    """
    shape, dtype = tuple(answer.values.shape), answer.values.dtype
    if (shape, dtype) != (tuple(local.shape), local.dtype):
        raise ExchangeFailed(f"{key}: expected an answer of shape {tuple(local.shape)} and {local.dtype}, but got {shape} and {dtype}")
    if answer.count < 1 or answer.batch < 1:
        raise ExchangeFailed(
            f"{key}: expected an answer with at least 1 activation and 1 sample, but it counts {answer.count} and {answer.batch}"
        )
    return answer


class Layer(NamedTuple):
    """A layer as the server knows it.

    Attributes:
        channels: number of channels.
        dtype: dtype of its vectors in messages.
    """

    channels: int
    dtype: torch.dtype


class Exchange(Protocol):
    """One client's side of a round's exchange.

    Attributes:
        batch: the number of samples that it announced.
        seconds: time that it waited so far.
    """

    batch: int
    seconds: float

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` over the cohort, and wait until all clients have sent theirs.

        Args:
            key: the exchange.
            local: the client's own values, (d,).
            count: activations per channel behind them.

        Raises:
            ExchangeFailed: the round's exchange cannot go on.
        """

    def close(self, error: str = "") -> None:
        """Leave the round. A second call does nothing.

        Args:
            error: the reason, which drops this client. Empty: the client is done.
        """
