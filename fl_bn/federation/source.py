"""Define what a client's round takes its data from. An example is ``sources.SampleSource``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.task import Task

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound


@dataclass(frozen=True)
class Trained:
    """Hold the result of training.

    Attributes:
        loss: The mean loss over the samples of the training batches.
        samples: The number of these samples; a sample that was drawn twice counts twice.
    """

    loss: float
    samples: int


@dataclass(frozen=True)
class Outcome:
    """Hold what a client says of its round in its reply, besides tensors.

    Attributes:
        samples: The number of different samples that it trained on, or measured. 0: it found none to train on, and sits out.
        loss: The mean loss over the training batches.
        metrics: Further numbers for the record, by name.
        tells_drift: Whether the reply says how far the statistics moved, if the client keeps them.
    """

    samples: int
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    tells_drift: bool = False


class Source(Protocol):
    """Provide one client's data, and draw batches from them."""

    @property
    def client(self) -> int:
        """Return the client's number."""
        ...

    @property
    def task(self) -> Task:
        """Return the task, which reads a batch."""
        ...

    @property
    def passes(self) -> int:
        """Return how often a round iterates over its batches."""
        ...

    @property
    def test(self) -> Any:
        """Return the client's own test data, samples or batches; None without any."""
        ...

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Draw the training batches of ``round``.

        Raises:
            ClientTooSmall: There are too few samples.
        """
        ...

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass of ``round``, and store the moments in it."""
        ...

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make the optimiser of ``round``."""
        ...

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of the learning rate within a round; None if the rate stays the same."""
        ...

    def training(self, round: LocalRound, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return a context in which torch's random numbers depend on the client and the round alone."""
        ...

    def pass_inputs(self, round: LocalRound) -> Iterable[Any]:
        """Return the inputs of the statistics pass, for an engine that makes the pass itself."""
        ...

    def full_gradient(self, round: LocalRound) -> Callable[[], dict[str, Tensor]] | None:
        """Return a function that computes the gradient over all samples of the client; None if there is none."""
        ...

    def outcome(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return what the client says of ``round`` in its reply.

        Args:
            round: The client's round.
            batches: The training batches; empty if the round only measures.
            trained: The result of each pass over ``batches``.
        """
        ...
