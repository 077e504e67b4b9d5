"""The client's half of a round, in plain torch: load, measure, train, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fl_bn.data.dataset import to_input
from fl_bn.exchange.call import Exchange
from fl_bn.layers import HybridBatchNorm, freeze_statistics, observe, pooled
from fl_bn.methods import Method, Phase, Report, StatisticsPass
from fl_bn.methods.fedtan import exchanging
from fl_bn.moments import Moments
from fl_bn.roles import roles
from fl_bn.training.settings import LocalTraining

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[np.ndarray]


@dataclass(frozen=True)
class Samples:
    """Labelled samples of one client: ``x`` uint8 images (N, C, H, W), or float32 (N, ...) as the network takes them; ``y`` int64 (N,)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (B, ...) in the dtype of ``like``, images as -1..1, and labels (B,), on its device."""
        chosen = torch.from_numpy(index)
        return to_input(self.x[chosen].to(like.device), like.dtype), self.y[chosen].to(like.device)


@dataclass
class LocalResult:
    """What one client's training yields; the model holds the new weights.

    ``loss``: mean over the samples of the training batches; ``samples``: different samples trained on; ``moments``: what the method
    reports of its statistics, empty if none; ``gradients``: of update='gradients', by parameter name.
    """

    loss: float = 0.0
    samples: int = 0
    steps: int = 0
    moments: dict[str, Moments] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


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


def train(
    model: nn.Module,
    samples: Samples,
    batches: Batches,
    settings: LocalTraining,
    learning_rate: float,
    method: Method,
    phase: Phase = Phase.TRAIN,
    loss: Loss = F.cross_entropy,
    momentum: Mapping[str, Tensor] | None = None,
    optimizer: Optimizer | None = None,
    exchange: Exchange | None = None,
) -> LocalResult:
    """Train ``model`` in place on ``batches`` (index arrays into ``samples``) as ``method`` and ``phase`` say.

    ``momentum``: the client's optimiser momentum of the round before, for update='gradients'. ``optimizer``: one that lives longer than
    the round; by default a fresh one. ``exchange``: in phase EXCHANGE, through which the first step's BatchNorm layers talk to the cohort.
    The statistics pass of HBN is a call of its own (``statistics_pass``), before this one.
    """
    if (phase is Phase.EXCHANGE) != (exchange is not None):
        raise ValueError(f"an exchange belongs to phase exchange, and phase exchange needs one, but got {phase} and {exchange}")
    like = next(model.parameters())
    model.train()
    if phase is Phase.FROZEN:
        freeze_statistics(model)
    if optimizer is None:
        optimizer = settings.make_optimizer([p for p in model.parameters() if p.requires_grad], learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    result, seen, total = LocalResult(), np.zeros(len(samples), dtype=bool), torch.zeros((), dtype=torch.float64, device=like.device)
    trained = 0
    observed: dict[str, list[Moments]] = {}
    with ExitStack() as stack:
        if method.reports(phase) is Report.BATCHES:
            observed = stack.enter_context(observe(model))
        for index in batches:
            x, y = samples.batch(index, like)
            optimizer.zero_grad()
            with exchanging(model, exchange) if exchange is not None and result.steps == 0 else nullcontext():
                with torch.autocast(like.device.type, torch.bfloat16, enabled=settings.precision == "mixed"):
                    batch_loss = loss(model(x), y)
                batch_loss.backward()
            if settings.update == "weights":
                optimizer.step()
            seen[index] = True
            trained += len(index)
            result.steps += 1
            total += batch_loss.detach().double() * len(index)
    result.loss, result.samples = float(total) / max(trained, 1), int(seen.sum())
    result.moments = pooled(observed)
    if settings.update == "gradients":
        result.gradients = _ema_gradients(model, settings, momentum or {})
        _step_local(model, method, result.gradients, learning_rate)
    return result


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
    """Moments of every BatchNorm layer's input over (a seeded random subset of) ``samples``, in evaluation mode.

    Changes nothing: no gradient, no random number but from ``rng``, no statistic, the mode of every module as before.
    """
    training = {module: module.training for module in model.modules()}
    chosen = np.arange(len(samples))
    if 0 < how.samples < len(samples):
        chosen = np.sort(rng.choice(len(samples), how.samples, replace=False))
    model.eval()
    if how.lower_layers == "hybrid":
        for layer in model.modules():
            layer.training = isinstance(layer, HybridBatchNorm)
    pieces = max(1, round(len(chosen) / batch_size))
    try:
        with observe(model) as observed:
            for index in np.array_split(chosen, pieces):
                model(samples.batch(index, next(model.parameters()))[0])
    finally:
        for module, mode in training.items():
            module.training = mode
    return pooled(observed)


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, batch_size: int = 500, loss: Loss = F.cross_entropy) -> tuple[float, float]:
    """Mean loss and accuracy of ``model`` in evaluation mode."""
    model.eval()
    like, total, correct = next(model.parameters()), 0.0, 0
    for index in np.array_split(np.arange(len(samples)), max(1, -(-len(samples) // batch_size))):
        x, y = samples.batch(index, like)
        out = model(x)
        total += float(loss(out, y)) * len(index)
        correct += int((out.argmax(1) == y).sum())
    return total / len(samples), correct / len(samples)
