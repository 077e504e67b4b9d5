"""Define FedTAN: each round's first local step equals a centralised step.

Why Batch Normalization Damage Federated Learning on Non-IID Data?, Wang, Shi,
Chang, Algorithms 1-3.

In the forward pass, every BatchNorm layer normalises with the moments of the
cohort's batches (Algorithm 2). In the backward pass, the gradients of these moments
are averaged (Algorithm 3). Each average is a call of ``exchange(key, local,
count)``. After that step, the models' average, weighted by batch sizes, is what
centralised training would give. Steps 2, 3, ... use each client's own batches.

Two schedules give equal results. ``paper`` exchanges means, then variances about
the common mean, then gradients (3L exchanges for L layers). ``merged`` sends mean
and variance together, and adds the spread of the means (2L).

Symbols: p_i -> share of client i in the sum of batch sizes; m_i, M -> ``count``, as
passed and as returned; G -> gradients that the exchange returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.layers import SharedNorm
from fl_bn.bn.moments import channel_moments, ordinary
from fl_bn.bn.observation import Uncopied, eagerly, in_backward, is_traced
from fl_bn.exchange.call import Answer, Exchange, Key, Quantity
from fl_bn.methods.fedavg import combine
from fl_bn.methods.method import Method, Phase, StatisticsReport, freeze, freeze_after, frozen_rate
from fl_bn.options import Options, option, takes

SCHEDULES = ("merged", "paper")
MOMENTUM = ("kept", "restarted")
FROZEN_RATE = 0.02
"""Share of the learning rate after the freeze in FedTAN-II: .5 before, .01 after (section 6.5)."""


@dataclass
class Live(Uncopied):
    """Connect a BatchNorm layer to its client's exchange with the cohort.

    A copied or pickled layer has ``live = None``.

    Attributes:
        answers: the cohort's moments that the exchange returned, one per call of
            the layer.
    """

    exchange: Exchange
    name: str
    paused: Callable[[], bool]
    answers: list[Answer] = field(default_factory=list)
    through: bool = False

    def went(self, gradient: Tensor) -> None:
        """Note that a backward pass went through the layer."""
        self.through = True


class CohortBatchNorm(SharedNorm):
    """Normalise with the moments of the cohort's batches while an exchange is open.

    Attributes:
        schedule: ``merged`` (2 exchanges per layer) or ``paper`` (3).
        share_gradients: whether the moments' gradients are averaged (Algorithm 3).
    """

    schedule, share_gradients = "merged", True
    held_with_affine = False  # as in torch's BatchNorm
    live: Live | None = None

    def normalised(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (B, C, *), with the cohort's moments if an exchange is open."""
        if self.observation is not None:
            self.observation(self, x)
        if not self.training:
            return self.normalise_shared(x)
        if self.live is None or self.live.paused():
            self._count()
            running = (self.running_mean, self.running_var)
            return F.batch_norm(x, *running, self.weight, self.bias, True, self.momentum, self.eps)
        return self._normalise_over_cohort(x, self.live, self.live.exchange)

    @eagerly
    def _normalise_over_cohort(self, x: Tensor, live: Live, exchange: Exchange) -> Tensor:
        repeated = in_backward()  # activation checkpointing repeats the pass, with the answer of the exchange before
        wrong = {
            "torch.jit.trace runs the network: trace a copy of it": is_traced(),
            "torch.func computes the gradient: make the first step by loss.backward()": torch._C._are_functorch_transforms_active(),
            f"the layer ran {len(live.answers)} times, so it is unknown which run is repeated: leave the layer out of the checkpoint": (
                repeated and len(live.answers) != 1
            ),
            "a forward pass in training mode has no gradients: evaluate in evaluation mode, use checkpoints with use_reentrant=False, and "
            "detach the output of a teacher in place of torch.no_grad()": not repeated and not torch.is_grad_enabled(),
            "another forward pass follows the backward pass: call the optimiser after the first batch, without gradient accumulation": (
                not repeated and live.through
            ),
        }
        if reasons := [words for words, holds in wrong.items() if holds]:
            raise ValueError(f"FedTAN exchanges the statistics of the first training batch in layer {live.name!r}, but {reasons[0]}")
        call = 0 if repeated else len(live.answers)
        moments = live.answers[0] if repeated else self._moments(x.detach(), call, live.name, exchange)
        if not repeated:
            live.answers.append(moments)
            self._follow(moments)
        mean_C, var_C = moments.values.to(x.device).chunk(2)
        key = Key(live.name, Quantity.GRADIENTS, call)
        back = exchange if self.share_gradients else None
        y: Tensor = _Normalise.apply(ordinary(x), self.weight, self.bias, mean_C, var_C, self.eps, key, back, moments)
        if y.requires_grad:
            y.register_hook(live.went)
        return y

    @torch.no_grad()
    def _follow(self, moments: Answer) -> None:
        """Move the running statistics towards the cohort's moments."""
        mean_C, var_C = moments.values.to(self.running_mean.device).chunk(2)
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), self.momentum)
        unbiased_C = var_C * (moments.count / max(moments.count - 1, 1))  # the factor first: variance times count may overflow
        self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), self.momentum)
        self._count()

    def _count(self) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)

    def _moments(self, x: Tensor, call: int, name: str, exchange: Exchange) -> Answer:
        """Return mean and biased variance (2C,) of the cohort's inputs (Algorithm 2)."""
        count = x.numel() // x.shape[1]
        mean_C, var_C = channel_moments(x)
        if self.schedule == "merged":
            return exchange(Key(name, Quantity.MOMENTS, call), torch.cat([mean_C, var_C]), count)
        answer = exchange(Key(name, Quantity.MEAN, call), mean_C, count)
        var_C = var_C + (mean_C - answer.values.to(x.device)).square()  # now about the cohort's mean
        var = exchange(Key(name, Quantity.VARIANCE, call), var_C, count).values
        return replace(answer, values=torch.cat([answer.values, var]))


class _Normalise(torch.autograd.Function):
    """Compute ``(x - mean) / sqrt(var + eps) * weight + bias``, and average the moments' gradients."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, weight_C, bias_C, mean_C, var_C, eps: float, key: Key, exchange: Exchange | None, moments: Answer
    ) -> Tensor:
        ctx.save_for_backward(x, weight_C, mean_C, var_C)
        ctx.eps, ctx.key, ctx.exchange, ctx.moments = eps, key, exchange, moments
        ctx.bias_dtype = None if bias_C is None else bias_C.dtype
        scale_C, shift_C = (None if affine is None else affine.to(mean_C.dtype) for affine in (weight_C, bias_C))
        return F.batch_norm(x, mean_C, var_C, scale_C, shift_C, False, 0.0, eps)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            raise ValueError(
                "FedTAN's first step exchanges the gradient of the loss once, but create_graph=True asks for a second derivative (a "
                "gradient penalty, for example): leave create_graph=True out of the first step of the round"
            )
        x, weight_C, mean_C, var_C = ctx.saved_tensors
        dims, shape = [0, *range(2, x.dim())], (1, -1, *([1] * (x.dim() - 2)))
        scale_C = torch.rsqrt(var_C + ctx.eps)
        centred, grad_wide = ordinary(x) - mean_C.view(shape), grad.to(mean_C.dtype)
        sum_C, sum_centred_C = grad_wide.sum(dims), (grad_wide * centred).sum(dims)
        affine_C = scale_C if weight_C is None else scale_C * weight_C
        g_mean_C = -affine_C * sum_C
        g_var_C = -0.5 * affine_C * scale_C.square() * sum_centred_C
        count, share = x.numel() // x.shape[1], 1.0  # share: s_i / p_i, which is 1 unless the clients' spatial sizes differ
        if ctx.exchange is not None:
            share = (count / ctx.moments.count) / (ctx.exchange.batch / ctx.moments.batch)
            g_mean_C, g_var_C = ctx.exchange(ctx.key, torch.cat([g_mean_C, g_var_C]), count).values.to(x.device).chunk(2)
        through_mean_C, through_var_C = g_mean_C * (share / count), g_var_C * (2 * share / count)
        grad_x = torch.addcmul(through_mean_C.view(shape), centred, through_var_C.view(shape))
        grad_x = grad_x.addcmul_(grad_wide, affine_C.view(shape)).to(x.dtype)
        grad_weight = None if weight_C is None else (sum_centred_C * scale_C).to(weight_C.dtype)
        grad_bias = None if ctx.bias_dtype is None else sum_C.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


@contextmanager
def exchanging(model: nn.Module, exchange: Exchange, paused: Callable[[], bool]) -> Iterator[None]:
    """Connect ``model``'s layers to ``exchange``, for a round's first local step (Algorithm 1).

    Forward and backward pass then work as on all the cohort's batches, but for
    passes while ``paused()``.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, CohortBatchNorm)}
    for name, layer in layers.items():
        layer.live = Live(exchange, name, paused)
    try:
        # otherwise one GPU thread would serve all clients' backward passes, and block
        with torch.autograd.set_multithreading_enabled(False):
            yield
        exchange.close()
    except BaseException as error:
        exchange.close(repr(error))
        raise
    finally:
        for layer in layers.values():
            vars(layer).pop("live", None)


def _layer(batch_norm: _BatchNorm, schedule: str, share_gradients: bool) -> CohortBatchNorm:
    layer = CohortBatchNorm.from_batch_norm(batch_norm)
    layer.schedule, layer.share_gradients = schedule, share_gradients
    return layer


def _exchange_phase(round: int, rounds: int) -> Phase:
    return Phase.EXCHANGE


@dataclass(frozen=True)
class FedTANOptions(Options):
    """Hold the options of ``fedtan`` and ``fedavg_alg2``."""

    name: ClassVar[str] = "fedtan"
    schedule: str = option(
        "merged",
        "number of layer-wise exchanges per round with L BatchNorm layers, besides the messages with the model: merged 2L, paper 3L; the "
        "results are equal",
        SCHEDULES,
        key="fedtan-schedule",
        hidden=True,
    )
    momentum: str = option(
        "kept",
        "the optimiser's momentum after the first local step: kept, or restarted, as in the authors' code",
        MOMENTUM,
        key="fedtan-momentum",
        hidden=True,
    )


@dataclass(frozen=True)
class Freezing(Options):
    """Declare ``freeze_after`` in a base class, as the first argument of ``fedtan2``."""

    freeze_after: int | None = freeze_after()


@dataclass(frozen=True)
class FedTAN2Options(FedTANOptions, Freezing):
    """Hold the options of ``fedtan2``, ``freeze_after`` first."""

    name: ClassVar[str] = "fedtan2"
    frozen_rate: float | None = frozen_rate()


@takes(FedTANOptions)
def fedtan(options: FedTANOptions) -> Method:
    """Make FedTAN: in each round's first local step, BatchNorm works on the cohort's batches."""
    return _exchanging(options, share_gradients=True)


def _exchanging(options: FedTANOptions, share_gradients: bool) -> Method:
    layer, restarts = partial(_layer, schedule=options.schedule, share_gradients=share_gradients), options.momentum == "restarted"
    return Method("fedtan", layer=layer, report=StatisticsReport.RUNNING, combine=combine, phase=_exchange_phase, restarts=restarts)


@takes(FedTAN2Options)
def fedtan2(options: FedTAN2Options) -> Method:
    """Make FedTAN-II: FedTAN until round ``freeze_after``, then with frozen statistics.

    The learning rate is then at most ``frozen_rate`` times the highest rate before.
    """
    method = freeze(_exchanging(options, share_gradients=True), options.freeze_after, rate=options.frozen_rate, unbounded_rate=FROZEN_RATE)
    return replace(method, name="fedtan2")


@takes(FedTANOptions)
def fedavg_alg2(options: FedTANOptions) -> Method:
    """Make FedAvg with Algorithm 2 only, the ablation of FedTAN's paper.

    Only the forward pass uses the cohort's moments.
    """
    return replace(_exchanging(options, share_gradients=False), name="fedavg-alg2")
