"""Record a round's batches and steps, as docs/contract.md defines them, in any loop.

Passes count in training mode under autograd, but not those of a copy, of
``torch.jit.trace``, or repeated by a backward pass. Steps of different parameters
without a batch between them are one (optimisers of several parts, or inside the
backward pass), and so are those of an optimiser around another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import in_backward, is_traced, learns_from_pass
from fl_bn.exchange.call import Exchange

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

Connect = Callable[[int], Exchange]
"""``connect(batch)`` joins the layer-wise exchange with a batch of ``batch`` samples."""


class Recorder:
    """Record the training passes of a round's network, and tell which steps belong together.

    It is also a forward pre-hook, which does nothing in a copy or a pickle. With
    ``once``, a layer's batches count only up to the first step before which the
    layer runs.

    Attributes:
        observed: Layer -> the moments of the recorded passes.
        batches: The number of steps before which some layer's batch was recorded.
        pauses: Whether nothing is recorded at present.
    """

    def __init__(self, once: bool = False) -> None:
        self.observed: dict[str, list[Moments]] = {}
        self.batches = 0
        self._once, self._done = once, set[int]()
        self._rows: dict[int, int] = {}  # id of a layer -> the number of rows of its inputs since the last step
        self._forward = set[int]()  # the layers that ran outside of a backward pass; others are inside a reentrant checkpoint
        self._kept: dict[str, int] = {}  # layer -> the number of its passes up to the last step
        self.pauses = self._came = False
        self._stepped, self._ended = set[int](), 0  # the parameters of the present step; how many optimisers' steps have ended
        self._begun: dict[int, int] = {}  # the id of an optimiser -> how many steps had ended when its newest step began

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Note a training pass of the network. FedAvg, with torch's layers, needs no more."""
        if learns_from_pass(model) and not self.pauses:
            self._came = True

    def counts(self, layer: nn.Module, x: Tensor) -> bool:
        """Tell whether the pass in which ``layer`` gets ``x`` is recorded."""
        if self.pauses or is_traced() or not (layer.training and torch.is_grad_enabled()):
            return False
        if not in_backward():
            self._forward.add(id(layer))
        elif id(layer) in self._forward:
            return False
        self._came = True
        if id(layer) in self._done:
            return False
        self._rows[id(layer)] = self._rows.get(id(layer), 0) + len(x)
        return True

    @property
    def samples(self) -> int:
        """Return the samples since the last step: rows of the layer that got fewest."""
        return min(self._rows.values(), default=0)

    def begins(self, optimizer: Optimizer) -> None:
        """Note that a step of ``optimizer`` begins."""
        self._begun[id(optimizer)] = self._ended

    def continues(self, optimizer: Optimizer, parameters: set[int]) -> bool:
        """Tell whether the step that ends, and moved ``parameters`` (ids), belongs to the one before.

        It does if another optimiser stepped inside, or no batch came since the
        steps of other parameters.
        """
        around = self._begun.get(id(optimizer), self._ended) < self._ended
        goes_on = around or (bool(self._stepped) and not self._came and self._stepped.isdisjoint(parameters))
        self._stepped = self._stepped | parameters if goes_on else parameters
        self._ended += 1
        return goes_on

    def next_step(self) -> bool:
        """End the present batch. Tell whether no layer waits for its first one."""
        self.batches += bool(self._rows)
        if self._once:
            self._done.update(self._rows)
        self._rows, self._came = {}, False
        self._kept = {name: len(parts) for name, parts in self.observed.items()}
        return self._once and all(self.observed.values())

    def forget(self) -> None:
        """Leave out the passes since the last step."""
        self._rows = {}
        for name, parts in self.observed.items():
            del parts[self._kept.get(name, 0) :]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self.pauses = self.pauses, True
        try:
            yield
        finally:
            self.pauses = before

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return partial, (_nothing,)


def _nothing(*args: Any) -> None:
    pass


_OPEN: tuple[LocalRound, ...] = ()
"""The open rounds of users' loops in any thread. Replaced as a whole, never changed."""
_LOCK, _HOOKS = Lock(), list[Any]()


@contextmanager
def following(round: LocalRound) -> Iterator[None]:
    """Tell ``round`` of each step of its parameters' optimisers inside the block.

    torch's hooks stay registered, since every thread uses them. Outside of rounds
    they do nothing.

    Raises:
        ValueError: Another round still trains the network.
    """
    global _OPEN
    with _LOCK:
        if any(one.model is round.model for one in _OPEN):
            raise ValueError("another round still trains this network: end that round first, or convert a network for each round")
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_before))
            _HOOKS.append(register_optimizer_step_post_hook(_after))
        _OPEN = (*_OPEN, round)
    try:
        yield
    finally:
        with _LOCK:
            _OPEN = tuple(one for one in _OPEN if one is not round)


def _before(optimizer: Optimizer, args: Any, named: Any) -> None:
    for round in _OPEN:
        round.recorder.begins(optimizer)


def _after(optimizer: Optimizer, args: Any, named: Any) -> None:
    for round in _OPEN:
        round.step_ends(optimizer)


@contextmanager
def unrecorded(model: nn.Module) -> Iterator[None]:
    """Make forward passes in a round that lead to no step: not recorded, and without effect on buffers.

    >>> import torch
    >>> from torch import nn
    >>> from fl_bn import unrecorded
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> with unrecorded(net):  # an attack, the second pass of a sharpness-aware step, a validation in training mode
    ...     out = net(torch.randn(16, 4))
    >>> int(net[1].num_batches_tracked)
    0

    Args:
        model: A round's network (``round.model``), a part of it, or a wrapper
            around it.
    """
    parts = set(model.modules())
    with ExitStack() as stack:
        for round in _OPEN:
            if not parts.isdisjoint(round.model.modules()):
                stack.enter_context(round.recorder.paused())
        stack.enter_context(restored(model))
        yield


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end of the block."""
    own = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, buffers in own:  # copies take the changes: torch keeps the buffers themselves for the backward pass
        module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)
