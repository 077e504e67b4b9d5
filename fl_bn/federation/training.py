"""Train a client by fl-bn's own loop, in seeded order: ``SampleLoop`` over samples in memory.

``engines.clients.LoaderLoop`` is the same loop over a user's loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import Augment, augmenter
from fl_bn.data.batches import to_input
from fl_bn.federation import schema
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Outcome
from fl_bn.federation.gradients import clip
from fl_bn.federation.local import NO_VARIANCE, PASS_BATCH, Samples, pieces, torch_seed
from fl_bn.federation.schema import Locality
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.values import Instruction
from fl_bn.methods import NORMALISERS, Method, Phase, StatisticsReport
from fl_bn.models.head import head_of
from fl_bn.task import CLASSIFICATION, Task, batch_size, one_number, to_device

BATCHES, DROPOUT, SUBSET, AUGMENT = range(4)  # the purpose of a generator, a part of the key of ``seeded``
LEFT_OUT = "left-out"  # the name of a number in a reply: how many batches of one sample the client did not train on


@dataclass(frozen=True)
class Trained:
    """Hold the result of training over a client's batches once.

    Attributes:
        samples: The samples in the training batches. One in two batches counts
            twice.
        left_out: The number of batches of one sample on which the network cannot
            train.
    """

    loss: float
    samples: int
    left_out: int = 0


def train(
    round: LocalRound, batches: Iterable[Any], task: Task, optimizer: Optimizer, scheduler: LRScheduler | None = None, passes: int = 1
) -> Trained:
    """Train ``round.model`` in place by settings, method and phase, inside ``round.open()``.

    The round makes ``passes`` over ``batches``, of which this is one. ``scheduler``
    steps after every batch. A batch of one sample is left out if a
    BatchNorm layer gets only one value per channel, which has no variance.
    """
    model, settings, rate = round.model, round.settings, round.instruction.learning_rate
    like, parameters = inputs_like(model), round.parameters
    how, limit = settings.clip, settings.clip_limit
    head = head_of(model) if how == "adaptive" else None
    if how == "round":
        batches, number = counted(batches)
        limit = settings.norm_in_round(rate, number * passes)
    total, count, left_out = torch.zeros((), dtype=torch.float64, device=like.device), 0, 0
    for batch in batches:
        x, y = (to_device(part, like.device) for part in task.read(batch))
        samples = batch_size(x, y)
        optimizer.zero_grad()
        if round.steps == 0:
            round.batch(samples)
        before = [buffer.clone() for buffer in model.buffers()] if samples == 1 else []
        try:
            loss = round.backward(partial(loss_of, model, task, settings, x, y), x, task.forward)
        except ValueError as error:
            if samples != 1 or NO_VARIANCE not in str(error):
                raise
            for buffer, value in zip(model.buffers(), before, strict=True):  # layers before the one that failed have seen the sample
                buffer.copy_(value)
            round.recorder.forget()
            left_out += 1
            continue
        if how != "none":
            clip(parameters.values(), how, limit, head[1].parameters() if head else ())
        if settings.update == "weights":
            optimizer.step()
            round.optimizer_stepped(optimizer)
        if scheduler is not None:
            scheduler.step()
        round.step_done()
        count += samples
        total += loss.detach().double() * samples
    return Trained(float(total) / max(count, 1), count, left_out)


def counted(batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """Return ``batches`` and their number, as a list if they have no length."""
    try:
        return batches, len(batches)  # type: ignore[arg-type]
    except TypeError:
        return (kept := list(batches)), len(kept)


def loss_of(model: nn.Module, task: Task, settings: LocalTraining, x: Any, y: Any) -> Tensor:
    """Compute a batch's mean loss, in the precision of ``settings``."""
    device = inputs_like(model).device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "mixed"):
        return one_number(task.loss(task.predict(model, x), y))


@dataclass
class IndexBatches:
    """Yield batches of ``samples``: inputs (B, ...), targets (B, ...), on the device of ``like``.

    Attributes:
        indices: For each batch, its samples' indices (B,).
        like: A tensor with the device, and the inputs' dtype.
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
        """Yield batches as stored: not scaled, and not moved to a device."""
        for index in self.indices:
            self.seen[index] = True
            yield self.samples.rows(index, self.augment)


@dataclass
class SampleLoop:
    """Train on a client's samples, as argument ``train`` of ``client_round``.

    Random numbers depend only on ``seed``, ``client`` and the round, which makes
    ``passes`` over ``batches``.
    """

    samples: Samples
    seed: int
    client: int
    task: Task = CLASSIFICATION
    passes: int = 1

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of the rate within a round, if any."""
        return None

    def seeded(self, round: LocalRound, purpose: int) -> AbstractContextManager[None]:
        """Return a context of random numbers by seed, client, round and ``purpose``."""
        seed = int(seeded(self.seed, self.client, round.instruction.round, purpose).integers(2**62))
        return torch_seed(seed, inputs_like(round.model).device)

    def __call__(self, round: LocalRound) -> Outcome:
        """Measure and train, as ``round`` asks."""
        if not round.trains:
            self.measure(round)
            return self.weighed(round, (), ())
        batches = self.batches(round)  # before the statistics pass, to refuse small clients first
        if round.reports is StatisticsReport.PASS:
            self.measure(round)
        optimizer = self.optimizer(round)
        if round.momentum is not None:
            round.momentum.load(optimizer)
        scheduler = self.scheduler(optimizer)
        with self.seeded(round, DROPOUT), round.open():
            trained = [train(round, batches, self.task, optimizer, scheduler, self.passes) for _ in range(self.passes)]
        if round.momentum is not None:
            round.momentum.keep(optimizer)
        left_out = sum(of.left_out for of in trained)
        return replace(self.weighed(round, batches, trained), metrics={LEFT_OUT: float(left_out)} if left_out else {})

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Draw the training batches. Raise ClientTooSmall if samples do not fill one."""
        settings, number = round.settings, round.instruction.round
        least = round.network.locality.fewest(round.phase)
        indices = settings.draw(len(self.samples), seeded(self.seed, self.client, number, BATCHES), least)
        changes = settings.augment != "none"  # without augmentation no generator is needed, and making one takes as long as a layer
        augment = augmenter(settings.augment, seeded(self.seed, self.client, number, AUGMENT)) if changes else None
        return IndexBatches(self.samples, indices, inputs_like(round.model), augment)

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass over the samples, or a seeded subset."""
        round.statistics_pass.measure(lambda: self.pass_inputs(round))

    def pass_inputs(self, round: LocalRound) -> Iterator[Any]:
        """Return and count the statistics pass's inputs, on the network's device."""
        own, how, n, like = round.statistics_pass, round.statistics_pass.how, len(self.samples), inputs_like(round.model)
        own.samples = how.size(n, round.settings.planned(n))
        size = round.settings.batch_size if how.measured == NORMALISERS else PASS_BATCH
        rng = seeded(self.seed, self.client, round.instruction.round, SUBSET, not round.trains)
        return (self.samples.batch(index, like)[0] for index in pieces(n, replace(how, samples=own.samples), rng, size))

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make the optimiser with the round's learning rate."""
        return round.settings.make_optimizer(round.parameters.values(), round.instruction.learning_rate)

    def weighed(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return the samples that the client weighs, and the mean loss."""
        n = len(self.samples)
        if not round.trains:
            return Outcome(n, client=self.client)
        assert isinstance(batches, IndexBatches)
        return Outcome(n if round.settings.weigh_all else int(batches.seen.sum()), trained[0].loss, client=self.client)


TRAINER: ContextVar[Callable[[SampleLoop, LocalRound], Outcome]] = ContextVar("trainer", default=SampleLoop.__call__)
"""The function that trains a client: by itself, or with others in ``engines.vectorised``."""


def alone(
    model: nn.Module,
    method: Method,
    settings: LocalTraining,
    learning_rate: float,
    phase: Phase = Phase.TRAIN,
    number: int = 0,
) -> LocalRound:
    """Make a client's round without a server, from the tensors of ``model``."""
    state, expected = model.state_dict(), schema.instruction(model, Locality.of(model, method), settings.auxiliary).sections
    sections = {section: {name: state[name].detach().clone() for name in names if name in state} for section, names in expected.items()}
    return LocalRound(model, method, Instruction(number, phase, sections, learning_rate), settings=settings)
