"""Watch a user's training loop during a round: its batches, the steps of its optimisers, and what it does to the network."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import Lock
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fl_bn.bn.layers import mixes_samples
from fl_bn.bn.observation import learns_from_pass, observe
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.client import LocalRound
from fl_bn.federation.finite_inputs import Hook
from fl_bn.methods import MOMENTS, Phase
from fl_bn.methods.fedtan import WITHOUT_GRADIENTS
from fl_bn.objectives import PLAIN

LOGGER = logging.getLogger("flwr")
_HIGHEST: dict[str, tuple[int, float]] = {}
"""Signature of a network -> its newest round, and the highest learning rate of its loops in rounds without frozen statistics.

A round with a lower number begins a new run, which forgets the rates of the run before it. Clients may have several rates.
"""


def _check_steps(round: LocalRound, before: Mapping[str, Tensor], without_gradients: bool) -> None:
    """Check that a round without a counted local step changed no weight. Warn if the network saw training batches in such a round.

    Args:
        round: The client's round.
        before: Name -> parameter at the start of the round.
        without_gradients: Whether an optimiser stepped without any gradient. Such a step does not count.

    Raises:
        ValueError: No step was counted, but a weight changed.
    """
    if round.steps:
        return
    now = dict(round.model.named_parameters())
    if moved := [name for name, tensor in before.items() if name in now and not torch.equal(now[name].detach().to(tensor.device), tensor)]:
        raise ValueError(
            f"{moved[0]} changed in round {round.instruction.round}, but no step of a torch.optim.Optimizer was seen: call "
            "round.step_done() after each step that your loop makes without a torch optimizer"
        )
    if round.batch:
        stepped, advice = (
            "no optimiser stepped a parameter of round.model",
            "make the optimiser with round.model.parameters(), not with the parameters of the network before convert",
        )
        if without_gradients:
            stepped, advice = (
                "the optimiser stepped without any gradient",
                "call loss.backward() before optimizer.step(), and zero_grad() not between them",
            )
        LOGGER.warning(
            "round %d: under %s, round.model saw batches, but %s, and no weight changed: %s",
            round.instruction.round,
            round.method.name,
            stepped,
            advice,
        )


def _per_sample(round: LocalRound) -> bool:
    """Tell whether opacus (differential privacy) computes the gradient of each single sample.

    opacus itself refuses torch's BatchNorm classes, and trainable layers with buffers. It accepts other layers
    that mix samples, so this function refuses these layers.

    Raises:
        ValueError: A layer mixes samples, so that a single sample has no gradient of its own; or the objective adds a
            part to the gradients, which opacus leaves out.
    """
    if not any(hasattr(p, "grad_sample") for p in round.parameters.values()):
        return False
    if mixing := [name for name, layer in batch_norms(round.model).items() if mixes_samples(layer)]:
        raise ValueError(
            f"BatchNorm layer {mixing[0]!r} normalises every sample with the statistics of its batch, so with {round.method.name} a single "
            "sample has no gradient of its own, and opacus's epsilon does not hold: choose a method without batch statistics, such as gn"
        )
    if round.settings.objective is not PLAIN:
        raise ValueError(
            f"opacus replaces the gradients, and so drops the part that {round.settings.objective.name} adds to them: train without an "
            "objective"
        )
    return True


@contextmanager
def watched(round: LocalRound) -> Iterator[None]:
    """Report the batches and the optimiser's steps of a user's loop to ``round``, inside the ``with`` block."""
    batches = _FirstBatch(round)
    steps = _Steps(round, batches)
    before = {name: parameter.detach().clone() for name, parameter in round.parameters.items()}
    round.watch_values(before)
    with _OPEN.counting(steps), batches.watching():
        yield
    if not steps.seen:
        _check_steps(round, before, steps.without_gradients)


class _Open:
    """Hold the steps of all rounds that are open in this process, possibly in several threads, for torch's global optimiser hooks.

    The hooks are registered once and stay: torch goes through them in each thread's ``Optimizer.step``, so none may be added
    or removed meanwhile.
    """

    def __init__(self) -> None:
        self._lock, self._registered = Lock(), False
        self._steps: tuple[_Steps, ...] = ()  # replaced as a whole, never changed

    def trains(self, model: nn.Module) -> bool:
        """Tell whether an open round trains ``model``."""
        return any(steps.trains(model) for steps in self._steps)

    @contextmanager
    def counting(self, steps: _Steps) -> Iterator[None]:
        """Report the optimisers' steps to ``steps`` inside the ``with`` block."""
        with self._lock:
            self._steps += (steps,)
            if not self._registered:
                register_optimizer_step_pre_hook(self._begin)
                register_optimizer_step_post_hook(self._end)
                self._registered = True
        try:
            yield
        finally:
            with self._lock:
                self._steps = tuple(one for one in self._steps if one is not steps)

    def _begin(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        for steps in self._steps:
            steps.begin(optimizer, args, named)

    def _end(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        for steps in self._steps:
            steps.end(optimizer, args, named)


class _Steps:
    """Count the local steps that optimisers make with parameters of a round's model.

    A step without gradients that changed no parameter does not count. Optimisers of different parameters that step after the
    same batch make one local step together. So do optimisers that step inside the backward pass, one for each parameter. An
    optimiser that steps inside the step of another one, which wraps it, makes no step of its own.

    Attributes:
        seen: Whether an optimiser made a step.
        without_gradients: Whether an optimiser stepped without any gradient.
    """

    def __init__(self, round: LocalRound, batches: _FirstBatch) -> None:
        self._round, self._batches = round, batches
        self._mine = {id(p) for p in round.model.parameters()}
        self._ids: dict[int, set[int]] = {}  # the id of an optimiser that makes a step -> those of its parameters
        self._outer: list[Optimizer] = []  # the optimisers that make a step, the outermost first
        self._before: dict[int, list[Tensor]] = {}  # the id of an optimiser that began a step without gradients -> its parameters then
        self._stepped = set[int]()  # the ids of the parameters in the present step of the weights
        self.seen = self.without_gradients = False

    def trains(self, model: nn.Module) -> bool:
        """Tell whether the round trains ``model`` itself."""
        return self._round.model is model

    def begin(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        """Prepare a step of ``optimizer``: note its parameters, and centre gradients if the method requires it."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._before.pop(id(optimizer), None)
        if self._mine.isdisjoint(ids):
            return
        while self._outer and (self._outer[-1] is optimizer or not _runs(self._outer[-1])):  # its step ended with an error
            self._ids.pop(id(self._outer.pop()), None)
        self._ids[id(optimizer)] = ids
        self._outer.append(optimizer)
        if not any(p.grad is not None for p in _parameters(optimizer)):
            self._before[id(optimizer)] = [p.detach().clone() for p in _parameters(optimizer)]
        self._round.optimizer_steps(ids)

    def end(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        """Count the step of ``optimizer``. A step without gradients that changed no parameter does not count.

        Raises:
            ValueError: The loop did not call ``round.backward``, though the round has an objective. Or the optimiser does
                not suit the objective, or the round does not work with opacus (see ``_per_sample``).
        """
        round = self._round
        if (ids := self._ids.pop(id(optimizer), None)) is None:
            return
        self._outer.remove(optimizer)
        before = self._before.pop(id(optimizer), None)
        if self._ids:  # the step of an optimiser around this one goes on
            return
        if before is not None and all(map(torch.equal, before, _parameters(optimizer))):  # and no closure computed any
            self.without_gradients = True
            return
        if not self.seen and _per_sample(round) and round.method.reports(round.phase) in MOMENTS:
            LOGGER.warning(
                "%s sends the moments of a training batch, which the noise of opacus does not protect: opacus's epsilon holds only for the "
                "weights",
                round.method.name,
            )
        self.seen = True
        if round.settings.objective is not PLAIN and not round.corrected:
            name = round.settings.objective.name
            raise ValueError(
                f"{name} computes or changes the gradients, but the loop did not call round.backward: call "
                "round.backward(lambda: loss_of(x), x) in place of loss.backward()"
            )
        goes_on = bool(self._stepped) and not self._batches.came and self._stepped.isdisjoint(ids)
        self._stepped = self._stepped | ids if goes_on else ids
        self._batches.came = False
        round.optimizer_stepped(optimizer, goes_on)
        if round.steps == 0:
            _check_rate(round)
        round.count_step(goes_on, ids)


def _runs(optimizer: Optimizer) -> bool:
    """Tell whether the step of ``optimizer`` is still running: whether torch's function that wraps this step is among the callers."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _check_rate(round: LocalRound) -> None:
    """Warn if the method lowers the learning rate in this round with frozen statistics, but the loop's rate is higher.

    The limit is the loop's highest rate in earlier rounds without frozen statistics, times ``rate_share``. If this process has
    seen no such round, the limit is the instruction's rate.
    """
    instruction, step_rate, network = round.instruction, round.rates.last, round.network.signature
    if step_rate is None:
        return
    if instruction.rate_share == 1:
        newest, highest = _HIGHEST.get(network, (0, 0.0))
        _HIGHEST[network] = instruction.round, step_rate if instruction.round < newest else max(step_rate, highest)
        return
    rate = instruction.learning_rate
    if network in _HIGHEST:
        _HIGHEST[network] = instruction.round, (highest := _HIGHEST[network][1])
        rate = highest * instruction.rate_share
    if step_rate > rate * (1 + 1e-6):
        LOGGER.warning(
            "round %d: the statistics are frozen. For such rounds %s lowers the learning rate to %.3g, but the rate of this loop is %.3g: "
            "multiply your rate by round.instruction.rate_share (%.3g), or the network may collapse",
            round.instruction.round, round.method.name, rate, step_rate, round.instruction.rate_share,
        )  # fmt: skip


class _FirstBatch:
    """Find the size of the first batch from the network's inputs and layers, unless the user's loop calls ``round.batch``."""

    def __init__(self, round: LocalRound) -> None:
        self._round, self._explicit = round, False
        self._sizes: list[int] = []  # possible sizes of the batch, from the arguments of the forward pass
        self._passes = 0
        self._backward_seen = False  # whether a gradient of a parameter was computed
        self.came = False  # whether a training batch came after the last step
        self._blind = False  # whether a layer ran in training mode without gradients, in the present pass of the network

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forward passes inside the ``with`` block."""
        round = self._round
        exchanges = round.phase is Phase.EXCHANGE
        handles = [round.model.register_forward_pre_hook(Hook(self._forward), with_kwargs=True)]
        if exchanges:
            handles += [p.register_post_accumulate_grad_hook(self._backward) for p in round.parameters.values()]
        try:
            with observe(round.model, counts=self._layer) if exchanges else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _backward(self, parameter: Tensor) -> None:
        self._backward_seen = True

    def _forward(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        round, self._blind = self._round, False
        if not learns_from_pass(model):
            return
        self.came = True
        if round.stepped:
            return
        self._passes += 1
        if self._passes == 1:
            _per_sample(round)
            self._explicit = round.begun
            self._sizes = [*_sizes((args, named))]
        elif round.phase is Phase.EXCHANGE:
            self._refuse()
        round.inputs_seen(next(iter(_sizes((args, named))), 0))

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"{self._round.method.name}'s first local step exchanges the statistics of one batch, but before this step the loop made a "
            "second forward pass in training mode: call the optimiser after the first batch, without gradient accumulation"
        )

    def _layer(self, layer: nn.Module, x: Tensor) -> bool:
        """Begin FedTAN's layer-wise exchange when the first BatchNorm layer of the first local step gets its input.

        The number of rows of this input is taken as the batch size, unless the loop called ``round.batch``.

        Args:
            layer: The BatchNorm layer that is about to run.
            x: The input of the layer, of shape (rows, ...).

        Returns:
            False, so that ``observe`` stores no moments.

        Raises:
            ValueError: The batch size is unclear, because the network's inputs or layers have different numbers of rows. Or
                the loop accumulates gradients. Or a layer ran before, in training mode without gradients.
        """
        round, rows = self._round, len(x)
        if round.steps:
            return False
        if not learns_from_pass(layer):
            self._blind |= layer.training and not torch.is_grad_enabled()
            return False
        if self._blind:
            raise ValueError(WITHOUT_GRADIENTS)
        if self._backward_seen:
            self._refuse()
        if not round.begun:
            if self._sizes and rows not in self._sizes:
                raise ValueError(
                    f"the first BatchNorm layer of the network saw {rows} rows, but the inputs have {self._sizes}, so the number of "
                    "samples is unclear: call round.batch with the right number, such as round.batch(32), before the first forward pass"
                )
            if not self._sizes:
                LOGGER.info(
                    "the first BatchNorm layer gets %d rows, so the batch should have as many samples. If not, call round.batch(number)",
                    rows,
                )
            round.begin_batch(rows)
        elif not self._explicit and rows != round.batch and self._passes:
            raise ValueError(
                f"the batch has {int(round.batch)} rows in one BatchNorm layer and {rows} in another, so its number of samples is "
                "unclear: call round.batch with the right number, such as round.batch(32), before the first forward pass"
            )
        return False


def _sizes(value: Any) -> Iterator[int]:
    """Yield possible sizes of a batch from its inputs: the length of a list, the first dimension of a tensor."""
    if isinstance(value, Tensor):
        if value.dim():
            yield len(value)
        return
    parts = list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else []
    if isinstance(value, list) and parts:
        yield len(parts)
    for part in parts:
        yield from _sizes(part)


_OPEN = _Open()


def check_not_open(model: nn.Module) -> None:
    """Check that no open round trains ``model``.

    Raises:
        ValueError: A round trains it.
    """
    if _OPEN.trains(model):
        raise ValueError("another round still trains this network: end that round first, or convert a network for each round")
