"""Recognise the forward passes of training batches, so that the reported moments count each batch once.

A user's training loop may make other forward passes, too. It may validate, or evaluate a copy of the network (an average
of the weights, a teacher). It may compute activations again (checkpointing), or call a closure several times. None of
these passes counts as a further batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fl_bn.moments import Moments
from fl_bn.observation import in_backward, is_traced


class TrainingPasses:
    """Decide, layer by layer, whether a forward pass counts as a batch of the optimiser's next step.

    Passes in training mode with autograd count, including all micro-batches whose gradients are added up. A pass that
    computes activations again does not count, nor does one that ``torch.jit.trace`` records. If the gradients are cleared
    before the step, a further pass at the same weights replaces the passes so far. A further pass at other weights does not
    count, and the passes so far stay counted. Such passes are those of a closure that is called again, or the second half
    of a sharpness-aware step.

    In a user's own loop, ``settle`` leaves out the passes from which no gradient for the step came. Examples are a batch that
    the loop skips, and the passes of an adversarial attack.

    Args:
        parameters: The parameters that learn, by name.
        once: Whether only the first step in which a layer runs counts for this layer.
        layers: The layers by name, for ``settle``; empty: ``settle`` leaves out nothing.

    Attributes:
        observed: Layer -> the moments of the counted passes.
        blind: Whether a step was made before the first batch, along gradients that are older than the round.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], once: bool = False, layers: Mapping[str, nn.Module] | None = None
    ) -> None:
        self._parameters = [p for p in parameters.values() if p.requires_grad]
        self._smallest = min(range(len(self._parameters)), key=lambda i: self._parameters[i].numel(), default=0)
        self._names = {id(layer): name for name, layer in (layers or {}).items()}
        self._once, self._done = once, set[int]()
        self.observed: dict[str, list[Moments]] = {}
        self._ignoring = self.blind = False
        self._rows: dict[int, list[int]] = {}
        self.next_step()

    def next_step(self) -> None:
        """Start to count the forward passes of the optimiser's next step."""
        if self._once:
            self._done |= self._rows.keys()
        self._rows = {}
        self._backwards: dict[int, list[set[int]]] = {}  # id of a layer -> for each counted pass, the backward passes through it
        self._used = set[int]()  # the backward passes that computed gradients of parameters
        self._forward_seen = self._backward_seen = False
        self._kept = {name: len(parts) for name, parts in self.observed.items()}
        self._weights = self._parameters[self._smallest].detach().clone() if self._parameters else None
        self._versions = [p._version for p in self._parameters]

    @property
    def samples(self) -> int:
        """Return the number of samples in the batches of the present step so far; 0 if no layer has run.

        This is the first dimension of a layer's inputs, summed over the passes. If the layers give different numbers, the
        smallest is returned, because the other layers run more than once in a pass.
        """
        return min((sum(rows) for rows in self._rows.values()), default=0)

    def counts(self, layer: nn.Module, x: Tensor) -> bool:
        """Tell whether the forward pass in which ``layer`` now gets the input ``x`` (B, ...) counts as a training batch."""
        if self._ignoring or is_traced() or not (layer.training and torch.is_grad_enabled()):
            return False
        if in_backward():
            if self._forward_seen:
                return False
        else:
            if self._backward_came and self._cleared():
                if self._moved():
                    return False
                if self._backward_seen:
                    self._start_over()
            self._forward_seen = True
        if id(layer) in self._done:
            return False
        self._rows.setdefault(id(layer), []).append(len(x))
        if id(layer) in self._names:
            self._follow(layer, x)
        return True

    @property
    def all_done(self) -> bool:
        """Tell whether no layer waits for its first batch any more. False if all passes count, not only the first step's."""
        return self._once and all(self.observed.values())

    @property
    def _backward_came(self) -> bool:
        """Tell whether a backward pass went through a pass of this step, also one that stored no gradient (``autograd.grad``)."""
        return self._backward_seen or any(map(any, self._backwards.values()))

    def _follow(self, layer: nn.Module, x: Tensor) -> None:
        """Note the backward passes that go through this pass of ``layer``, whose input is ``x``."""
        through = set[int]()
        self._backwards.setdefault(id(layer), []).append(through)
        if x.requires_grad:
            x.register_hook(lambda gradient: through.add(_backward_pass()))

    def settle(self) -> None:
        """Leave out the passes from which no gradient for this step came, as the step is about to be counted.

        If no gradient of parameters came through any of a layer's passes, they all stay.
        """
        self.blind |= self._once and not (self._done or self._rows or self._backward_seen)
        for key, passes in self._backwards.items():
            if not any(through & self._used for through in passes):
                continue
            keep = [bool(through & self._used) for through in passes]
            parts, rows = self.observed[self._names[key]], self._rows[key]
            start = len(parts) - len(keep)
            parts[start:] = [part for part, kept in zip(parts[start:], keep, strict=True) if kept]
            rows[:] = [samples for samples, kept in zip(rows, keep, strict=True) if kept]
        self._backwards.clear()

    def _moved(self) -> bool:
        """Tell whether the weights changed since the last step: by operations that torch counts, or through ``.data``."""
        if self._weights is None or [p._version for p in self._parameters] != self._versions:
            return True
        return not torch.equal(self._parameters[self._smallest], self._weights)

    def _cleared(self) -> bool:
        """Tell whether all gradients are zero or None, so that the next pass is no further micro-batch."""
        return not any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)

    def _start_over(self) -> None:
        """Forget the passes since the last step, because their gradients were cleared before the optimiser used them."""
        self._rows.clear()
        self._backwards.clear()
        self._used.clear()
        self._backward_seen = False
        for name, parts in self.observed.items():
            del parts[self._kept.get(name, 0) :]

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
        """Note every backward pass inside the ``with`` block."""

        def computed(parameter: Tensor) -> None:
            self._backward_seen = True
            self._used.add(_backward_pass())

        handles: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(computed) for p in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _backward_pass() -> int:
    """Return the number of the backward pass that is running, which no other has."""
    return int(torch._C._current_graph_task_id())
