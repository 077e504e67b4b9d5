"""The client's round: one function over a source of batches, for every engine and every door that trains by itself.

A user's own training loop has the same round around it: ``own_loop.local_round``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.federation.client import LocalRound
from fl_bn.federation.clipping import clip, norm_in_round
from fl_bn.federation.momentum import restart
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import ClientState, Reply
from fl_bn.methods import StatisticsReport
from fl_bn.models.head import head_of
from fl_bn.roles import inputs_like
from fl_bn.task import CLASSIFICATION, Task, to_device


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        loss: The mean over the samples of the training batches.
        samples: How many these were; a sample that was drawn twice counts twice.
    """

    loss: float
    samples: int


class Source(Protocol):
    """The data of one client, and how batches are drawn from them."""

    @property
    def client(self) -> int:
        """The client's number."""
        ...

    @property
    def task(self) -> Task:
        """The task, which reads a batch."""
        ...

    @property
    def passes(self) -> int:
        """How often the batches of a round are gone through."""
        ...

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Draw the training batches of ``round``. Raises ClientTooSmall where there are too few samples."""
        ...

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass of ``round``, whose moments it then has."""
        ...

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make the optimiser of ``round``."""
        ...

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make what changes the rate within a round, if anything does."""
        ...

    def training(self, round: LocalRound, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Let torch draw (dropout, a shuffling loader) from the client and the round alone, for the block in which these train."""
        ...

    def pass_inputs(self, round: LocalRound) -> Iterable[Any]:
        """Return the inputs of the statistics pass, where an engine makes the pass."""
        ...

    def full_gradient(self, round: LocalRound) -> Callable[[], dict[str, Tensor]] | None:
        """Return what computes the gradient over all samples, where an objective asks for it."""
        ...

    def reply(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> tuple[Reply, ClientState]:
        """Make the reply of ``round``, after passes over ``batches``."""
        ...


class Member(NamedTuple):
    """One client of a cohort: its round, and its source of batches."""

    round: LocalRound
    source: Source


Result = tuple[Reply, ClientState]


class Engine(Protocol):
    """How the clients of a cohort compute: each alone, or all as one program."""

    def check(self, members: Sequence[Member]) -> None:
        """Raise an error of the engine's where it cannot compute these."""
        ...

    def measure(self, members: Sequence[Member]) -> None:
        """Make every member's statistics pass."""
        ...

    def train(self, members: Sequence[Member], batches: Sequence[Iterable[Any]]) -> list[list[Trained]]:
        """Train every member on its own ``batches``, and return what each pass over them gave."""
        ...

    def reply(self, member: Member, batches: Iterable[Any], trained: Sequence[Trained]) -> Result:
        """Make one member's reply."""
        ...


class _OneByOne:
    def check(self, members: Sequence[Member]) -> None:
        pass

    def measure(self, members: Sequence[Member]) -> None:
        for round, source in members:
            source.measure(round)

    def train(self, members: Sequence[Member], batches: Sequence[Iterable[Any]]) -> list[list[Trained]]:
        return [self._train(*member, own) for member, own in zip(members, batches, strict=True)]

    def reply(self, member: Member, batches: Iterable[Any], trained: Sequence[Trained]) -> Result:
        return member.source.reply(member.round, batches, trained)

    def _train(self, round: LocalRound, source: Source, batches: Iterable[Any]) -> list[Trained]:
        optimizer = source.optimizer(round)
        round.load_momentum(optimizer)
        scheduler = source.scheduler(optimizer)
        with source.training(round, optimizer), round.open(source.full_gradient(round)):
            trained = [train(round, batches, source.task, optimizer, scheduler) for _ in range(source.passes)]
        round.keep_momentum(optimizer)
        return trained


ONE_BY_ONE = _OneByOne()


def client_rounds(members: Sequence[Member], engine: Engine = ONE_BY_ONE) -> list[Result]:
    """Carry out the rounds of several clients: measure, train, reply.

    Args:
        members: The clients, all with the same method and phase.
        engine: How they compute.

    Returns:
        The reply to the server and the state that the client keeps, of each member in order.

    Raises:
        ClientTooSmall: A client has fewer samples than the round's method needs (one has no variance), or than a batch with ``drop_last``.
    """
    if not members:
        return []
    first = members[0].round
    engine.check(members)
    if not first.trains:
        engine.measure(members)
        return [engine.reply(member, (), ()) for member in members]
    batches = [source.batches(round) for round, source in members]  # before the statistics pass, which one sample may break
    if first.method.reports(first.phase) is StatisticsReport.PASS:
        engine.measure(members)
    trained = engine.train(members, batches)
    return [engine.reply(*one) for one in zip(members, batches, trained, strict=True)]


def client_round(round: LocalRound, source: Source) -> Result:
    """Carry out the round of one client by itself: see ``client_rounds``."""
    return client_rounds([Member(round, source)])[0]


def train(
    round: LocalRound,
    batches: Iterable[Any],
    task: Task = CLASSIFICATION,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> Trained:
    """Train ``round.model`` in place on ``batches``, as the round's settings, method and phase say, inside ``round.open()``.

    Args:
        round: The client's round.
        batches: Gone through once.
        task: Reads a batch and computes its loss.
        optimizer: Default: a fresh one, as the settings say.
        scheduler: Of the optimiser; stepped after every batch.
    """
    model, settings, rate = round.model, round.settings, round.instruction.learning_rate
    like, parameters = inputs_like(model), round.parameters
    if optimizer is None:
        optimizer = settings.make_optimizer(parameters.values(), rate)
    how, limit = settings.clipping(round.method.freezes_statistics(round.phase))
    head = head_of(model) if how == "adaptive" else None
    if how == "round":
        batches, number = counted(batches)
        limit = norm_in_round(limit, rate, number, settings.momentum)
    total, count = torch.zeros((), dtype=torch.float64, device=like.device), 0
    for batch in batches:
        x, y = (to_device(part, like.device) for part in task.read(batch))
        optimizer.zero_grad()
        if round.steps == 0:
            round.begin_batch(len(y))
        loss = round.backward(partial(loss_of, model, task, settings, x, y), x)
        round.gradient_ready()
        if how != "none":
            clip(parameters.values(), how, limit, head[1].parameters() if head else ())
        if settings.update == "weights":
            optimizer.step()
        restart(optimizer, round.method, round.phase, round.steps)
        if scheduler is not None:
            scheduler.step()
        round.step_done()
        count += len(y)
        total += loss.detach().double() * len(y)
    return Trained(float(total) / max(count, 1), count)


def counted(batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """Return ``batches`` and their number: a list of them where they do not know it themselves."""
    try:
        return batches, len(batches)  # type: ignore[arg-type]
    except TypeError:
        return (kept := list(batches)), len(kept)


def loss_of(model: nn.Module, task: Task, settings: LocalTraining, x: Any, y: Any) -> Tensor:
    """Compute the loss of one batch, in the precision of ``settings``."""
    device = inputs_like(model).device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "mixed"):
        return task.loss(task.predict(model, x), y)
