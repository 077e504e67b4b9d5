"""Carry out a client's round with fl-bn's own training loop, over batches from a ``Source``, for every engine and transport.

A user's own training loop runs inside a ``LocalRound`` too, see ``own_loop.local_round``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.roles import inputs_like
from fl_bn.federation.client import LocalRound
from fl_bn.federation.clipping import clip
from fl_bn.federation.local import tested
from fl_bn.federation.momentum import restart
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.source import Engine, Member, Result, Source, Trained
from fl_bn.methods import StatisticsReport
from fl_bn.models.head import head_of
from fl_bn.task import CLASSIFICATION, Task, batch_size, one_number, to_device


class _OneByOne:
    def check(self, members: Sequence[Member]) -> None:
        pass

    def measure(self, members: Sequence[Member]) -> None:
        for round, source in members:
            source.measure(round)

    def train(self, members: Sequence[Member], batches: Sequence[Iterable[Any]]) -> list[list[Trained]]:
        return [self._train(*member, own) for member, own in zip(members, batches, strict=True)]

    def _train(self, round: LocalRound, source: Source, batches: Iterable[Any]) -> list[Trained]:
        optimizer = source.optimizer(round)
        round.momentum.load(optimizer)
        scheduler = source.scheduler(optimizer)
        with source.training(round, optimizer), round.open(source.full_gradient(round)):
            trained = [train(round, batches, source.task, optimizer, scheduler) for _ in range(source.passes)]
        round.momentum.keep(optimizer)
        return trained


ONE_BY_ONE = _OneByOne()


def client_rounds(members: Sequence[Member], engine: Engine = ONE_BY_ONE) -> list[Result]:
    """Carry out the rounds of several clients: measure, train, reply.

    Args:
        members: The clients' rounds and sources of batches. All have the same method and phase.
        engine: Computes the rounds. Default: one client after the other.

    Returns:
        For each member, in order, the reply to the server and the state that the client keeps.

    Raises:
        ClientTooSmall: A client has only one sample, and its method needs a variance. Or ``drop_last`` is set, and the
            client has fewer samples than a batch.
    """
    if not members:
        return []
    first = members[0].round
    engine.check(members)
    if not first.trains:
        engine.measure(members)
        return [round.reply(source.outcome(round, (), ()).samples, client=source.client) for round, source in members]
    batches = [source.batches(round) for round, source in members]  # before the statistics pass, to refuse small clients first
    if first.method.reports(first.phase) is StatisticsReport.PASS:
        engine.measure(members)
    before = [tested(*member) for member in members]
    trained = engine.train(members, batches)
    both = zip(before, [tested(*member) for member in members], strict=True)
    values = [{} if one is None or other is None else {"before": one, "after": other} for one, other in both]
    outcomes = [source.outcome(round, own, done) for (round, source), own, done in zip(members, batches, trained, strict=True)]
    return [
        round.reply(one.samples, one.loss, client=source.client, metrics={**one.metrics, **own}, tells_drift=one.tells_drift)
        if one.samples
        else round.sit_out(source.client, one.metrics)
        for (round, source), one, own in zip(members, outcomes, values, strict=True)
    ]


def client_round(round: LocalRound, source: Source) -> Result:
    """Carry out the round of one client, see ``client_rounds``."""
    return client_rounds([Member(round, source)])[0]


def train(
    round: LocalRound,
    batches: Iterable[Any],
    task: Task = CLASSIFICATION,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> Trained:
    """Train ``round.model`` in place by the round's settings, method and phase. Call this inside ``with round.open()``.

    Args:
        round: The client's round.
        batches: Batches, over which training iterates once.
        task: Reads a batch and computes its loss.
        optimizer: The optimiser. Default: a fresh one from the round's settings.
        scheduler: A scheduler of ``optimizer``, stepped after every batch. Default: none.
    """
    model, settings, rate = round.model, round.settings, round.instruction.learning_rate
    like, parameters = inputs_like(model), round.parameters
    if optimizer is None:
        optimizer = settings.make_optimizer(parameters.values(), rate)
    how, limit = settings.clip, settings.clip_limit
    head = head_of(model) if how == "adaptive" else None
    if how == "round":
        batches, number = counted(batches)
        limit = settings.norm_in_round(rate, number)
    total, count = torch.zeros((), dtype=torch.float64, device=like.device), 0
    for batch in batches:
        x, y = (to_device(part, like.device) for part in task.read(batch))
        samples = batch_size(x, y)
        optimizer.zero_grad()
        if round.steps == 0:
            round.begin_batch(samples)
        loss = round.backward(partial(loss_of, model, task, settings, x, y), x, task.forward)
        round.gradient_ready()
        if how != "none":
            clip(parameters.values(), how, limit, head[1].parameters() if head else ())
        if settings.update == "weights":
            optimizer.step()
        restart(optimizer, round.method, round.phase, round.steps)
        if scheduler is not None:
            scheduler.step()
        round.count_step()
        count += samples
        total += loss.detach().double() * samples
    return Trained(float(total) / max(count, 1), count)


def counted(batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """Return ``batches`` and their number. If ``batches`` has no length, return a list of all batches instead."""
    try:
        return batches, len(batches)  # type: ignore[arg-type]
    except TypeError:
        return (kept := list(batches)), len(kept)


def loss_of(model: nn.Module, task: Task, settings: LocalTraining, x: Any, y: Any) -> Tensor:
    """Compute the mean loss of one batch, in the precision that ``settings`` asks for."""
    device = inputs_like(model).device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "mixed"):
        return one_number(task.loss(task.predict(model, x), y))
