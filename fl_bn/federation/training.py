"""The application's training loop: seeded index batches, a task's loss, an objective, clipping, mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.data.augment import Augment, augmenter
from fl_bn.data.dataset import to_input
from fl_bn.federation import schema
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.client import Connect, LocalRound
from fl_bn.federation.clipping import clip, norm_in_round
from fl_bn.federation.local import PASS_BATCH, Samples, statistics_pass, torch_seed
from fl_bn.federation.momentum import restart
from fl_bn.federation.one_sample import fewest
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.unrecorded import Draws, unrecorded
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.methods import NORMALISERS, Method, Phase, Report
from fl_bn.models.head import head_of
from fl_bn.roles import inputs_like
from fl_bn.task import CLASSIFICATION, Task, to_device

BATCHES, DROPOUT, SUBSET, AUGMENT = range(4)  # what a seeded generator is for


@dataclass
class IndexBatches:
    """Batches of ``samples`` by index arrays, as inputs and targets on the device, and in the dtype, of ``like``.

    ``seen``: which samples were drawn so far. ``augment``: changes every batch.
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
        """The batches as they lie in memory: not yet scaled, not yet on a device."""
        for index in self.indices:
            self.seen[index] = True
            yield self.samples.rows(index, self.augment)


@dataclass(frozen=True)
class Trained:
    """``loss``: mean over the samples of the training batches; ``samples``: how many these were, a sample drawn twice counted twice."""

    loss: float
    samples: int


def train(
    round: LocalRound,
    batches: Iterable[Any],
    task: Task = CLASSIFICATION,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
) -> Trained:
    """Train ``round.model`` in place on ``batches``, as the round's settings, method and phase say, inside ``round.open()``.

    ``optimizer``: by default a fresh one, as the settings say. ``scheduler``: of it, stepped after every batch.
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
    """Return ``batches``, and how many there are: a list of them where they do not know it themselves."""
    try:
        return batches, len(batches)  # type: ignore[arg-type]
    except TypeError:
        return (kept := list(batches)), len(kept)


def loss_of(model: nn.Module, task: Task, settings: LocalTraining, x: Any, y: Any) -> Tensor:
    """Of one batch, in the precision of ``settings``."""
    device = inputs_like(model).device.type
    with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "mixed"):
        return task.loss(task.predict(model, x), y)


def client_round(
    round: LocalRound, samples: Samples, seed: int, client: int, task: Task = CLASSIFICATION, tells_drift: bool = False
) -> tuple[Reply, ClientState]:
    """All of one client's round on ``samples``, as the round's settings say. All that is drawn at random depends on ``seed``, the client
    and the round alone.

    Raises:
        ClientTooSmall: fewer samples than the round's method needs (``one_sample.fewest``): one has no variance. Or fewer than a batch,
            with ``drop_last``.
    """
    settings, number, n = round.settings, round.instruction.round, len(samples)

    def measure() -> None:
        rng, size = how_measured(round, n, seed, client)
        round.moments = statistics_pass(round.model, samples, round.asked, rng, size, measure=round.measured)

    if not round.trains:
        measure()
        return round.reply(n, client=client)
    batches = drawn(round, samples, seed, client)  # before the statistics pass, which one sample may break
    if round.method.reports(round.phase) is Report.PASS:
        measure()
    like = inputs_like(round.model)
    optimizer = settings.make_optimizer(round.parameters.values(), round.instruction.learning_rate)
    round.load_momentum(optimizer)
    dropout = int(seeded(seed, client, number, DROPOUT).integers(2**62))
    with torch_seed(dropout, like.device), round.open(full_gradient(round, samples, task)):
        trained = train(round, batches, task, optimizer)
    round.keep_momentum(optimizer)
    return round.reply(settings.weight(int(batches.seen.sum()), n), trained.loss, client=client, tells_drift=tells_drift)


def least_of(round: LocalRound) -> int:
    """Return how many samples a batch of ``round`` must have at least."""
    return fewest(round.network.original, round.method, round.phase)


def how_measured(round: LocalRound, n: int, seed: int, client: int) -> tuple[np.random.Generator, int]:
    """What the round's statistics pass over ``n`` samples draws from, and the size of its batches; the round notes how many it takes."""
    round.measured_samples = min(round.asked.samples or n, n)
    size = round.settings.batch_size if round.asked.measured == NORMALISERS else PASS_BATCH
    return seeded(seed, client, round.instruction.round, SUBSET, not round.trains), size


def drawn(round: LocalRound, samples: Samples, seed: int, client: int) -> IndexBatches:
    """The training batches of this round, as the settings say."""
    settings, number = round.settings, round.instruction.round
    indices = settings.draw(len(samples), seeded(seed, client, number, BATCHES), least_of(round))
    changes = settings.augment != "none"  # else nothing is drawn, and making a generator takes as long as a layer
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
    """Return the round ``number`` of ``model`` by itself, from the tensors that it has."""
    state, expected = model.state_dict(), schema.instruction(model, method, auxiliary(settings)).sections
    sections = {section: {name: state[name].detach().clone() for name in names if name in state} for section, names in expected.items()}
    return LocalRound(model, method, Instruction(number, phase, sections, learning_rate), kept, settings, connect)


def full_gradient(round: LocalRound, samples: Samples, task: Task = CLASSIFICATION) -> Callable[[], dict[str, Tensor]]:
    """Computes the gradient of the mean loss over ``samples``, weight decay included, in batches of about the batch size, in the mode that
    the model is in; changes nothing."""
    model, settings, trained = round.model, round.settings, round.parameters

    def compute() -> dict[str, Tensor]:
        draws, mean = Draws.now(inputs_like(model).device), {name: torch.zeros_like(p) for name, p in trained.items()}
        for index in np.array_split(np.arange(len(samples)), max(1, len(samples) // settings.batch_size)):
            model.zero_grad()
            with unrecorded(model):
                loss_of(model, task, settings, *samples.batch(index, inputs_like(model))).backward()
            for name, p in trained.items():
                if p.grad is not None:
                    mean[name].add_(p.grad, alpha=len(index) / len(samples))
        model.zero_grad()
        draws.again()
        return {name: gradient.add_(trained[name].detach(), alpha=settings.weight_decay) for name, gradient in mean.items()}

    return compute
