"""The client's half of a round, in plain torch: load, measure, train, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.data.augment import Augment
from fl_bn.data.dataset import to_input
from fl_bn.exchange.call import Exchange
from fl_bn.federation.clipping import clip, norm_in_round
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.unrecorded import Draws, unrecorded
from fl_bn.layers import HybridBatchNorm, freeze_statistics, inputs, normalisers, observe, pooled
from fl_bn.methods import NORMALISERS, Method, Phase, Report, StatisticsPass
from fl_bn.methods.fedtan import exchanging
from fl_bn.models.head import head_of
from fl_bn.moments import Moments
from fl_bn.objectives import Finish, Round, Start, Step
from fl_bn.roles import Role, roles
from fl_bn.task import CLASSIFICATION, MetricState, Task, to_device

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[np.ndarray]


@dataclass(frozen=True)
class Samples:
    """Samples of one client: ``x`` uint8 images (N, C, H, W), or float32 (N, ...) as the network takes them; ``y`` int64 (N,).

    ``y`` may also be masks (N, H, W), 255 where a pixel has no label, values float32 (N,) or (N, D), or sets of labels, 0 or 1 (N, K).
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray, like: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Inputs (B, ...) in the dtype of ``like``, images as -1..1, and labels (B,), on its device; ``augment``: changes them before."""
        chosen = torch.from_numpy(index)
        x, y = self.x[chosen], self.y[chosen]
        if augment is not None:
            x, y = augment(x, y)
        return to_input(x.to(like.device), like.dtype), y.to(like.device)


@dataclass
class LocalResult:
    """What one client's training yields; the model holds the new weights.

    ``loss``: mean over the samples of the training batches; ``samples``: different samples trained on; ``first``: samples of the first
    batch; ``moments``: what the method reports of its statistics, empty if none; ``gradients``: of update='gradients', by parameter name;
    ``finish``: what the objective keeps and sends.
    """

    loss: float = 0.0
    samples: int = 0
    first: int = 0
    steps: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    finish: Finish = Finish()


@contextmanager
def torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from ``seed`` inside the block; outside, torch's generators are as they were."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every accelerator, forked or not
        with torch.cuda.device(device) if cuda else nullcontext():
            if cuda:
                torch.cuda.manual_seed(seed)
            yield


def trainable(model: nn.Module, method: Method, phase: Phase) -> dict[str, nn.Parameter]:
    """What an optimiser of this phase steps, by name: all that learns, but what the method freezes."""
    role = roles(model)
    fixed = method.frozen if phase is Phase.FROZEN else frozenset()
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and role[name] not in fixed}


def train(
    model: nn.Module,
    samples: Samples,
    batches: Batches,
    settings: LocalTraining,
    learning_rate: float,
    method: Method,
    phase: Phase = Phase.TRAIN,
    task: Task = CLASSIFICATION,
    kept: Mapping[str, Mapping[str, Tensor]] | None = None,
    control: Mapping[str, Tensor] | None = None,
    counted: bool = True,
    optimizer: Optimizer | None = None,
    exchange: Exchange | None = None,
    augment: Augment | None = None,
) -> LocalResult:
    """Train ``model`` in place on ``batches`` (index arrays into ``samples``) as ``method`` and ``phase`` say.

    ``kept``: of the client's round before, sections ``momentum`` (of update='gradients') and ``objective``. ``control``: the server's
    control variate, for SCAFFOLD, and ``counted``, whether what this client sent last is in it. ``optimizer``: one that lives longer than
    the round; by default a fresh one. ``exchange``: in phase EXCHANGE, through which the first step's BatchNorm layers talk to the
    cohort. ``augment``: changes every training batch (``data.augment.augmenter``). The statistics pass of HBN is a call of its own
    (``statistics_pass``), before this one.
    """
    if (phase is Phase.EXCHANGE) != (exchange is not None):
        raise ValueError(f"an exchange belongs to phase exchange, and phase exchange needs one, but got {phase} and {exchange}")
    like, kept, objective = next(model.parameters()), kept or {}, settings.objective
    model.train()
    if phase is Phase.FROZEN and Role.STATISTIC in method.frozen:
        freeze_statistics(model)
    trained = trainable(model, method, phase)
    if optimizer is None:
        optimizer = settings.make_optimizer(trained.values(), learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    result, seen, total = LocalResult(), np.zeros(len(samples), dtype=bool), torch.zeros((), dtype=torch.float64, device=like.device)
    count = 0
    observed: dict[str, list[Moments]] = {}
    head = head_of(model) if settings.clip == "adaptive" else None
    limit = settings.clip_limit
    if settings.clip == "round":
        batches = list(batches)
        limit = norm_in_round(limit, learning_rate, len(batches), settings.momentum)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(like.device.type, torch.bfloat16, enabled=settings.precision == "mixed"):
            return task.loss(task.predict(model, x), y)

    round = _begin(settings, model, method, trained, samples, loss_of, kept, control or {}, counted)
    with ExitStack() as stack:
        if method.reports(phase) in (Report.BATCHES, Report.FIRST):
            observed = stack.enter_context(observe(model))
        for index in batches:
            x, y = samples.batch(index, like, augment)
            optimizer.zero_grad()
            with exchanging(model, exchange) if exchange is not None and result.steps == 0 else nullcontext():
                batch_loss = round.gradient(_step(model, partial(loss_of, x, y), x, observed, objective.repeats))
            if settings.clip != "none":
                clip(trained.values(), settings.clip, limit, head[1].parameters() if head else ())
            if settings.update == "weights":
                optimizer.step()
            if method.reports(phase) is Report.FIRST:
                stack.close()  # the batches to come are seen by a local model, of which nothing is reported
            seen[index], result.first = True, result.first or len(index)
            count += len(index)
            result.steps += 1
            total += batch_loss.detach().double() * len(index)
    result.loss, result.samples = float(total) / max(count, 1), int(seen.sum())
    result.moments = pooled(observed)
    result.finish = round.finish(result.steps, learning_rate)
    if settings.update == "gradients":
        result.gradients = _ema_gradients(model, settings, kept.get("momentum", {}))
        _step_local(model, method, result.gradients, learning_rate)
    return result


def _begin(
    settings: LocalTraining,
    model: nn.Module,
    method: Method,
    trained: Mapping[str, nn.Parameter],
    samples: Samples,
    loss_of: Loss,
    kept: Mapping[str, Mapping[str, Tensor]],
    control: Mapping[str, Tensor],
    counted: bool,
) -> Round:
    role = roles(model)
    shared = frozenset(name for name in trained if method.shares(role[name]))
    full = partial(_full_gradient, model, trained, samples, loss_of, settings)
    return settings.objective.begin(Start(model, trained, shared, kept.get("objective", {}), control, counted, full))


def _step(model: nn.Module, forward: Callable[[], Tensor], x: Tensor, observed: dict[str, list[Moments]], repeats: bool) -> Step:
    draws = Draws.now(x.device) if repeats else None

    def again() -> Tensor:
        if draws is not None:
            draws.again()
        with unrecorded(model, observed):
            return forward()

    return Step(x, forward, again)


def _full_gradient(
    model: nn.Module, trained: Mapping[str, nn.Parameter], samples: Samples, loss_of: Loss, settings: LocalTraining
) -> dict[str, Tensor]:
    """Of the mean loss over ``samples``, weight decay included, in batches of about the batch size, in the mode that the model is in."""
    draws, mean = Draws.now(next(model.parameters()).device), {name: torch.zeros_like(p) for name, p in trained.items()}
    for index in np.array_split(np.arange(len(samples)), max(1, len(samples) // settings.batch_size)):
        model.zero_grad()
        with unrecorded(model, {}):
            loss_of(*samples.batch(index, next(model.parameters()))).backward()
        for name, p in trained.items():
            if p.grad is not None:
                mean[name].add_(p.grad, alpha=len(index) / len(samples))
    model.zero_grad()
    draws.again()
    return {name: gradient.add_(trained[name].detach(), alpha=settings.weight_decay) for name, gradient in mean.items()}


def _ema_gradients(model: nn.Module, settings: LocalTraining, momentum: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``m <- momentum * m + (1 - momentum) * g``: DSGD's client momentum (FBN, section 6)."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            gradient = gradient + settings.weight_decay * parameter.detach()
            before = momentum.get(name, torch.zeros_like(gradient)).to(gradient)
            gradients[name] = settings.momentum * before + (1 - settings.momentum) * gradient
    return gradients


def _step_local(model: nn.Module, method: Method, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
    """The server never steps what stays home, so the client does."""
    role = roles(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients and not method.shares(role[name]):
                parameter.sub_(gradients[name], alpha=learning_rate)


@torch.no_grad()
def statistics_pass(
    model: nn.Module, samples: Samples, how: StatisticsPass, rng: np.random.Generator, batch_size: int = 256
) -> dict[str, Moments]:
    """Moments that ``how`` asks for, of every BatchNorm layer over (a seeded random subset of) ``samples``, in evaluation mode.

    Changes nothing: no gradient, no random number but from ``rng``, no statistic, the mode of every module as before. Normalisers depend
    on how data fall into batches: they are measured in random batches of about ``batch_size``, which should be that of training. A
    normaliser needs two samples: of fewer nothing is measured.
    """
    training = {module: module.training for module in model.modules()}
    chosen = np.arange(len(samples))
    if 0 < how.samples < len(samples):
        chosen = np.sort(rng.choice(len(samples), how.samples, replace=False))
    if how.measured == NORMALISERS:
        rng.shuffle(chosen)
        if len(chosen) < 2:
            return {}
        batch_size = min(batch_size, len(chosen))
    model.eval()
    if how.lower_layers == "hybrid":
        for layer in model.modules():
            layer.training = isinstance(layer, HybridBatchNorm)
    pieces = max(1, round(len(chosen) / batch_size))
    try:
        with observe(model, normalisers if how.measured == NORMALISERS else inputs) as observed:
            for index in np.array_split(chosen, pieces):
                model(samples.batch(index, next(model.parameters()))[0])
    finally:
        for module, mode in training.items():
            module.training = mode
    return pooled(observed)


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Samples | Iterable[Any], batch_size: int = 0, task: Task = CLASSIFICATION
) -> MetricState:
    """``model`` in evaluation mode on ``data``: samples, or batches of any iterable as ``task.read`` takes them (a DataLoader's, say).

    ``batch_size``: of samples; 0: 500, or 8 with masks, which are large.
    """
    model.eval()
    state, like = task.state(), next(model.parameters())
    if isinstance(data, Samples):
        size = batch_size or (500 if data.y.ndim <= 2 else 8)
        pieces = np.array_split(np.arange(len(data)), max(1, -(-len(data) // size)))
        batches: Iterable[Any] = (data.batch(index, like) for index in pieces)
    else:
        batches = (to_device(task.read(batch), like.device) for batch in data)
    for x, y in batches:
        state.update(task.predict(model, x), y)
    return state
