"""Draw batches from samples in memory, in an order that depends on the seed, for fl-bn's own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import Augment, augmenter
from fl_bn.data.dataset import to_input
from fl_bn.federation import schema
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import loss_of
from fl_bn.federation.first_batch import Connect
from fl_bn.federation.local import PASS_BATCH, Draws, Samples, pieces, statistics_pass, torch_seed
from fl_bn.federation.locality import Locality
from fl_bn.federation.one_sample import fewest
from fl_bn.federation.recording import restored
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.source import Outcome, Trained
from fl_bn.federation.values import NOTHING, ClientState, Instruction
from fl_bn.methods import NORMALISERS, Method, Phase, StatisticsPass
from fl_bn.task import CLASSIFICATION, Task

BATCHES, DROPOUT, SUBSET, AUGMENT = range(4)  # the purpose of a generator, a part of the key of ``seeded``


@dataclass
class IndexBatches:
    """Iterate over batches of ``samples``. Yield inputs (B, ...) and targets (B, ...) on the device of ``like``.

    Attributes:
        samples: The client's samples.
        indices: For each batch, an array with the indices of its samples (B,).
        like: A tensor with the device for inputs and targets, and the dtype for inputs.
        augment: Changes every batch; None: no changes.
        seen: For each sample (N,), whether it was in a batch so far.
    """

    samples: Samples
    indices: list[np.ndarray]
    like: Tensor
    augment: Augment | None = None
    seen: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.seen = np.zeros(len(self.samples), dtype=bool)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.rows():
            yield to_input(x.to(self.like.device), self.like.dtype), y.to(self.like.device)

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of each batch as they are stored: not scaled, and not moved to a device."""
        for index in self.indices:
            self.seen[index] = True
            yield self.samples.rows(index, self.augment)


@dataclass(frozen=True)
class SampleSource:
    """Draw batches from one client's samples, as the settings of a round say.

    All random numbers depend only on ``seed``, ``client`` and the round.

    Attributes:
        samples: The client's samples.
        seed: The seed of the run.
        client: The client's number.
        task: Computes the loss.
        tells_drift: Whether the reply says how far the client's own running statistics moved (FedBN).
        test: The client's test samples, for settings with ``local_evaluation``.
    """

    samples: Samples
    seed: int
    client: int
    task: Task = CLASSIFICATION
    tells_drift: bool = False
    test: Samples | None = None
    passes = 1

    def batches(self, round: LocalRound) -> IndexBatches:
        """Draw the training batches.

        Raises:
            ClientTooSmall: There are too few samples for a batch.
        """
        return training_batches(round, self.samples, self.seed, self.client)

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass over the samples, or over a seeded subset of them."""
        how, rng, size = pass_sampling(round, len(self.samples), self.seed, self.client)
        own = round.statistics_pass
        own.moments = statistics_pass(round.model, self.samples, how, rng, size, measure=own.measure)

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make the optimiser that the round's settings name, with the learning rate of the round."""
        return round.settings.make_optimizer(round.parameters.values(), round.instruction.learning_rate)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return None, since the learning rate changes only between rounds."""
        return None

    def pass_inputs(self, round: LocalRound) -> Iterator[Tensor]:
        """Yield the inputs of the statistics pass, batch by batch, on the CPU."""
        how, rng, size = pass_sampling(round, len(self.samples), self.seed, self.client)
        dtype = inputs_like(round.model).dtype
        return (to_input(self.samples.rows(index)[0], dtype) for index in pieces(len(self.samples), how, rng, size))

    def training(self, round: LocalRound, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return a context manager inside which torch's random numbers depend only on the seed, the client and the round."""
        seed = int(seeded(self.seed, self.client, round.instruction.round, DROPOUT).integers(2**62))
        return torch_seed(seed, inputs_like(round.model).device)

    def full_gradient(self, round: LocalRound) -> Callable[[], dict[str, Tensor]]:
        """Return a function that computes the gradient of the mean loss over all samples, see ``sources.full_gradient``."""
        return full_gradient(round, self.samples, self.task)

    def outcome(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return the numbers for the client's reply: its weight in averages as a number of samples, and the mean loss.

        In a round that only measures, the weight is the number of all samples of the client.
        """
        n = len(self.samples)
        if not round.trains:
            return Outcome(n)
        assert isinstance(batches, IndexBatches)
        return Outcome(round.settings.weight(int(batches.seen.sum()), n), trained[0].loss, tells_drift=self.tells_drift)


def pass_sampling(round: LocalRound, n: int, seed: int, client: int) -> tuple[StatisticsPass, np.random.Generator, int]:
    """Prepare the statistics pass of ``round``, and store its number of samples in ``round.statistics_pass``.

    Args:
        round: The client's round.
        n: The number of the client's samples.
        seed: The seed of the run.
        client: The client's number.

    Returns:
        The statistics pass with its number of samples; the generator that draws these samples; and the batch size.
    """
    own, how = round.statistics_pass, round.statistics_pass.how
    own.samples = how.size(n, round.settings.planned(n))
    size = round.settings.batch_size if how.measured == NORMALISERS else PASS_BATCH
    rng = seeded(seed, client, round.instruction.round, SUBSET, not round.trains)
    return replace(how, samples=own.samples), rng, size


def training_batches(round: LocalRound, samples: Samples, seed: int, client: int) -> IndexBatches:
    """Draw the training batches of ``round``, as its settings say.

    Args:
        round: The client's round.
        samples: The client's samples.
        seed: The seed of the run.
        client: The client's number.

    Raises:
        ClientTooSmall: There are too few samples for a batch.
    """
    settings, number = round.settings, round.instruction.round
    least = fewest(round.network.original, round.network.locality, round.phase)
    indices = settings.draw(len(samples), seeded(seed, client, number, BATCHES), least)
    changes = settings.augment != "none"  # without augmentation no generator is needed, and making one takes as long as a layer
    augment = augmenter(settings.augment, seeded(seed, client, number, AUGMENT)) if changes else None
    return IndexBatches(samples, indices, inputs_like(round.model), augment)


def alone(
    model: nn.Module,
    method: Method,
    settings: LocalTraining,
    learning_rate: float,
    phase: Phase = Phase.TRAIN,
    kept: ClientState = NOTHING,
    connect: Connect | None = None,
    number: int = 0,
) -> LocalRound:
    """Make a client's round without a server. The round starts from the tensors of ``model``.

    Args:
        model: The converted network.
        method: The method.
        settings: The settings of training.
        learning_rate: The learning rate.
        phase: The phase of the round.
        kept: The state of the client.
        connect: Joins a layer-wise exchange.
        number: The number of the round.
    """
    state, expected = model.state_dict(), schema.instruction(model, Locality.of(model, method), auxiliary(settings)).sections
    sections = {section: {name: state[name].detach().clone() for name in names if name in state} for section, names in expected.items()}
    return LocalRound(model, method, Instruction(number, phase, sections, learning_rate), kept, settings, connect)


def full_gradient(round: LocalRound, samples: Samples, task: Task = CLASSIFICATION) -> Callable[[], dict[str, Tensor]]:
    """Return a function that computes the gradient of the mean loss over ``samples``, weight decay included.

    The returned function divides the samples into batches of about the batch size. It runs them in the model's present
    mode, sets the gradients to None, and changes nothing else. It returns parameter's name -> gradient.
    """
    model, settings, trained = round.model, round.settings, round.parameters

    def compute() -> dict[str, Tensor]:
        draws, mean = Draws.now(inputs_like(model).device), {name: torch.zeros_like(p) for name, p in trained.items()}
        for index in np.array_split(np.arange(len(samples)), max(1, len(samples) // settings.batch_size)):
            model.zero_grad()
            with restored(model):
                loss_of(model, task, settings, *samples.batch(index, inputs_like(model))).backward()
            for name, p in trained.items():
                if p.grad is not None:
                    mean[name].add_(p.grad, alpha=len(index) / len(samples))
        model.zero_grad()
        draws.again()
        return {name: gradient.add_(trained[name].detach(), alpha=settings.weight_decay) for name, gradient in mean.items()}

    return compute
