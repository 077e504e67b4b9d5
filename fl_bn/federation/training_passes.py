"""Recognise the forward passes of training batches, so that the reported moments count each batch once.

A user's training loop may make other forward passes, too. It may validate, or evaluate a copy of the network (an average
of the weights, a teacher). It may compute activations again (checkpointing), call a closure several times, attack its
inputs, or skip a batch. None of these passes counts as a further batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import in_backward, is_traced


@dataclass
class _Pass:
    """Describe a counted forward pass of one layer.

    Attributes:
        samples: The number of samples in the layer's input.
        through: The numbers of the backward passes that went through this forward pass.
    """

    samples: int
    through: set[int] = field(default_factory=set)


class _Gradient:
    """Record which backward passes are summed in the gradient of one parameter.

    Attributes:
        parameter: The parameter.
        held: The numbers of these backward passes, since the last step.
        dropped: The numbers of those that were summed before the gradient was cleared.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.held, self.dropped = set[int](), set[int]()
        self._made: weakref.ref[Tensor] | None = None  # the gradient as autograd left it
        self._version = -1

    def before(self, gradient: Tensor) -> None:
        """Note whether the gradient was cleared, before autograd adds ``gradient`` to it."""
        now = self.parameter.grad
        if now is None or (self._changed(now) and not now.is_sparse and not bool(now.any())):
            self._clear()

    def after(self) -> None:
        """Note the backward pass whose gradient autograd has just added."""
        self.held.add(_backward_pass())
        if (now := self.parameter.grad) is not None:
            self._made, self._version = weakref.ref(now), now._version

    def settle(self) -> None:
        """Note whether the gradient is cleared at a step."""
        if self.parameter.grad is None:
            self._clear()

    @property
    def seen(self) -> bool:
        """Tell whether autograd has computed a gradient since the last step."""
        return bool(self.held or self.dropped)

    @property
    def replaced(self) -> bool:
        """Tell whether the loop has put another tensor in the place of the gradient that autograd computed."""
        return self.parameter.grad is not None and (self._made is None or self._made() is not self.parameter.grad)

    def next_step(self) -> None:
        """Forget the backward passes, because the step that they belong to is over."""
        self.held, self.dropped = set(), set()

    def _clear(self) -> None:
        self.dropped |= self.held
        self.held = set()

    def _changed(self, now: Tensor) -> bool:
        return self._made is None or self._made() is not now or self._version != now._version


class TrainingPasses:
    """Decide, layer by layer, whether a forward pass counts as a batch of the optimiser's next step.

    Passes in training mode with autograd count, including all micro-batches whose gradients are added up. A pass that
    computes activations again does not count, nor does one that ``torch.jit.trace`` records. After a backward pass, a pass
    at other weights does not count either. Examples are the passes of a closure that is called again, and of the second half
    of a sharpness-aware step.

    In a user's own loop, ``settle`` leaves out the passes whose gradients the step does not use. Examples are a batch that
    the loop skips, and the passes of an adversarial attack. The loop may replace ``p.grad`` by a tensor of its own (sums of
    clipped gradients, ``torch.autograd.grad``). Then every forward pass counts for which a backward pass was made.

    Args:
        parameters: The parameters that learn, by name.
        once: Whether only the first step in which a layer runs counts for this layer.
        layers: The layers by name, for ``settle``; None: ``settle`` leaves out nothing, as in fl-bn's own training loop.

    Attributes:
        observed: Layer -> the moments of the counted passes.
        blind: Whether a step was made before the first batch, along gradients that are older than the round.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], once: bool = False, layers: Mapping[str, nn.Module] | None = None
    ) -> None:
        self._parameters = [p for p in parameters.values() if p.requires_grad]
        self._smallest = min(self._parameters, key=Tensor.numel, default=None)
        self._gradients = [_Gradient(p) for p in self._parameters] if layers is not None else []
        self._names = {id(layer): name for name, layer in (layers or {}).items()}
        self._once, self._done = once, set[int]()
        self.observed: dict[str, list[Moments]] = {}
        self._ignoring = self.blind = False
        self._passes: dict[int, list[_Pass]] = {}
        self.next_step()

    def next_step(self) -> None:
        """Start to count the forward passes of the optimiser's next step."""
        if self._once:
            self._done |= {layer for layer, passes in self._passes.items() if passes}
        self._passes = {}  # id of a layer -> its counted passes
        self._forward = set[int]()  # the layers that ran outside a backward pass
        self._weights: tuple[list[int], Tensor | None] | None = None  # at the first counted pass: versions, and a copy of the smallest
        self._backward_came = False  # since the last step, also one that stored no gradient (``autograd.grad``)
        self._kept = {name: len(parts) for name, parts in self.observed.items()}
        for gradient in self._gradients:
            gradient.next_step()

    @property
    def samples(self) -> int:
        """Return the number of samples in the batches of the present step so far; 0 if no layer has run.

        This is the first dimension of a layer's inputs, summed over the passes. If the layers give different numbers, the
        smallest is returned, because the other layers run more than once in a pass.
        """
        return min((sum(one.samples for one in passes) for passes in self._passes.values()), default=0)

    def counts(self, layer: nn.Module, x: Tensor) -> bool:
        """Tell whether the forward pass in which ``layer`` now gets the input ``x`` (B, ...) counts as a training batch."""
        if self._ignoring or is_traced() or not (layer.training and torch.is_grad_enabled()):
            return False
        if in_backward():  # also the only pass with gradients of a layer inside a reentrant checkpoint
            if id(layer) in self._forward:
                return False
        else:
            if self._backward_came and self._moved():
                return False
            self._forward.add(id(layer))
        if id(layer) in self._done:
            return False
        if self._weights is None:
            smallest = None if self._smallest is None else self._smallest.detach().clone()
            self._weights = [p._version for p in self._parameters], smallest
        self._passes.setdefault(id(layer), []).append(_Pass(len(x)))
        if x.requires_grad:
            self.follow(layer, x)
        return True

    def follow(self, layer: nn.Module, x: Tensor) -> None:
        """Note the backward passes that go through the last counted pass of ``layer``.

        Args:
            layer: The layer.
            x: Its input or output in that pass, which needs a gradient.
        """
        if id(layer) not in self._names:
            return
        through = self._passes[id(layer)][-1].through

        def went(gradient: Tensor) -> None:
            self._backward_came = True
            through.add(_backward_pass())

        x.register_hook(went)

    @property
    def all_done(self) -> bool:
        """Tell whether no layer waits for its first batch any more. False if all passes count, not only the first step's."""
        return self._once and all(self.observed.values())

    def settle(self, parameters: Container[int] | None = None) -> None:
        """Leave out the passes whose gradients the step does not use. Call this just before the step is counted.

        If no gradient came through any of a layer's passes, they all stay.

        Args:
            parameters: The ids of the parameters that the step changes. None: all.
        """
        self.blind |= self._once and not (self._done or self._passes or self._backward_came)
        through = {number for passes in self._passes.values() for one in passes for number in one.through}
        if len(through) < 2 and all(one.through for passes in self._passes.values() for one in passes):
            return
        for gradient in self._gradients:
            gradient.settle()
        computed = [g for g in self._gradients if g.seen and (parameters is None or id(g.parameter) in parameters)]
        if not computed or any(g.replaced for g in computed):
            held, dropped, elsewhere = through, set[int](), set[int]()
        else:
            held = {number for g in computed for number in g.held}
            dropped = {number for g in computed for number in g.dropped} - held
            elsewhere = {number for g in self._gradients for number in g.held} - dropped
        for key, passes in self._passes.items():
            keep = [not one.through.isdisjoint(held | elsewhere) for one in passes]
            if key in self._names and any(keep) and not all(keep):
                self._leave_out(self._names[key], passes, keep)

    def _leave_out(self, name: str, passes: list[_Pass], keep: list[bool]) -> None:
        parts = self.observed[name]
        start = len(parts) - len(keep)
        parts[start:] = [part for part, kept in zip(parts[start:], keep, strict=True) if kept]
        passes[:] = [one for one, kept in zip(passes, keep, strict=True) if kept]

    def close(self) -> None:
        """Leave out the passes since the last step, at the end of a loop."""
        for name, parts in self.observed.items():
            del parts[self._kept.get(name, 0) :]

    def _moved(self) -> bool:
        """Tell whether the weights changed since this step's first pass: by operations that torch counts, or through ``.data``."""
        if self._weights is None:
            return False
        versions, smallest = self._weights
        if [p._version for p in self._parameters] != versions:
            return True
        return self._smallest is not None and smallest is not None and not torch.equal(self._smallest, smallest)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Count no pass inside the ``with`` block."""
        self._ignoring = True
        try:
            yield
        finally:
            self._ignoring = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every gradient that autograd computes inside the ``with`` block."""

        def after(gradient: _Gradient, parameter: Tensor) -> None:
            self._backward_came = True
            gradient.after()

        with ExitStack() as hooks:
            for gradient in self._gradients:
                hooks.callback(gradient.parameter.register_hook(gradient.before).remove)
                hooks.callback(gradient.parameter.register_post_accumulate_grad_hook(partial(after, gradient)).remove)
            yield


def _backward_pass() -> int:
    """Return the number of the backward pass that is running. No other backward pass has this number."""
    return int(torch._C._current_graph_task_id())
