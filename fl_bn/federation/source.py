"""Define what computes a client's round: the source of its batches, such as ``sources.SampleSource``, and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.federation.values import ClientState, Reply
from fl_bn.task import Task

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound


@dataclass(frozen=True)
class Trained:
    """Hold the result of training over a client's batches once.

    Attributes:
        loss: The mean loss over the samples of the training batches.
        samples: The number of these samples. A sample in two batches counts twice.
    """

    loss: float
    samples: int


@dataclass(frozen=True)
class Outcome:
    """Hold the numbers of a client's reply about its round.

    Attributes:
        samples: The number of different samples that the client trained on, or measured. With ``LocalTraining.weigh_all``, the
            number of all its samples. 0: the client sat the round out.
        loss: The mean loss over the training batches; NaN if the client did not train.
        metrics: Further numbers for the record, by name.
        tells_drift: Whether the reply says how far the client's own running statistics moved (FedBN).
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
        """Return how often a training round iterates over ``batches``."""
        ...

    @property
    def test(self) -> Any:
        """Return the client's own test data, as samples or as batches; None if it has none."""
        ...

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Draw the training batches of ``round``.

        Raises:
            ClientTooSmall: There are too few samples.
        """
        ...

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass of ``round``, and store the moments in ``round.statistics_pass``."""
        ...

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make the optimiser of ``round``."""
        ...

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of the learning rate within a round; None if the rate stays the same."""
        ...

    def training(self, round: LocalRound, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return a context manager inside which torch's random numbers depend only on the seed, the client and the round."""
        ...

    def pass_inputs(self, round: LocalRound) -> Iterable[Any]:
        """Return the batches of inputs of the statistics pass, for an engine that makes this pass itself."""
        ...

    def full_gradient(self, round: LocalRound) -> Callable[[], dict[str, Tensor]] | None:
        """Return a function that computes the gradient of the mean loss over all of the client's samples, by parameter name.

        Return None if this source cannot compute that gradient.
        """
        ...

    def outcome(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return the numbers for the client's reply about ``round``.

        Args:
            round: The client's round.
            batches: The training batches; empty if the round only measures.
            trained: The result of each pass over ``batches``.
        """
        ...


class Member(NamedTuple):
    """Hold the round of one client of a cohort, and its source of batches."""

    round: LocalRound
    source: Source


Result = tuple[Reply, ClientState]


class Engine(Protocol):
    """Compute the rounds of a cohort's clients: one after the other, or all together in vectorised code."""

    def check(self, members: Sequence[Member]) -> None:
        """Raise an error if this engine cannot compute the rounds of the clients ``members``. Otherwise do nothing."""
        ...

    def measure(self, members: Sequence[Member]) -> None:
        """Run the statistics pass of every client in ``members``."""
        ...

    def train(self, members: Sequence[Member], batches: Sequence[Iterable[Any]]) -> list[list[Trained]]:
        """Train each client in ``members`` on its own ``batches``.

        Returns:
            For each client, the result of each pass over its batches.
        """
        ...
