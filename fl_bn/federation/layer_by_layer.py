"""Measure exact statistics of every BatchNorm layer in one forward pass: the clients measure one layer after the other.

Passes (``federation.passes``) give the same numbers with one forward pass per layer, because each pass makes one more
layer exact. In this module, all batches of a client stop at a layer until the cohort's statistics of the layer's input
arrive (one exchange), and continue with these. So nothing is computed twice, as long as the activations of all batches
fit into memory. If they do not, every layer takes a forward pass of its own, which ends at that layer.

The layers are in the order of their first use. A network has no such order if it uses a layer twice, or if its batches
take different ways through it. Then it is measured by passes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_bn.exchange.call import Exchange, ExchangeFailed, Key, Quantity
from fl_bn.exchange.session import exchanged_layers
from fl_bn.modes import held_layers
from fl_bn.moments import Moments, pool
from fl_bn.roles import batch_norms, inputs_like
from fl_bn.task import tensors_in

LOGGER = logging.getLogger("flwr")
HELD = 3  # activations of a waiting forward pass, as a multiple of a BatchNorm layer's largest input: input, output and a shortcut

Inputs = Callable[[], Iterable[Any]]
"""Returns the batches of inputs, the same in every call."""
Forward = Callable[[nn.Module, Any], Any]
Reached = Callable[[str, Tensor], None]
LayerMoments = tuple[str, Moments]
"""A layer, and the moments of its input."""


def called(model: nn.Module, x: Any) -> Any:
    """Run a network in the usual way."""
    return model(x)


@dataclass(frozen=True)
class LayerOrder:
    """Hold the order of a network's layers, from a forward pass over two samples.

    Attributes:
        problem: The reason why its layers cannot be measured in turn; empty if they can.
        held: Bytes that a waiting forward pass holds, per element of its input.
    """

    problem: str
    held: float = 0.0

    @classmethod
    @torch.no_grad()
    def at(cls, model: nn.Module, inputs: Inputs, forward: Forward) -> LayerOrder:
        """Find the order by a forward pass of two samples from the first batch. ``model`` stays unchanged."""
        batch = next(iter(inputs()), None)
        if batch is None:
            return cls("there is no batch to measure")
        few = batch[:2] if isinstance(batch, Tensor) else batch
        order, largest = list[str](), 0

        def reached(layer: str, x: Tensor) -> None:
            nonlocal largest
            order.append(layer)
            largest = max(largest, x.numel() * x.element_size())

        with _watched(model, reached):
            forward(model, few)
        if not order:
            return cls("no BatchNorm layer runs")
        if twice := [layer for place, layer in enumerate(order) if layer in order[:place]]:
            return cls(f"the network uses BatchNorm layer {twice[0]!r} more than once")
        own = sum(part.numel() * part.element_size() for part in tensors_in(few))
        return cls("", (HELD * largest + own) / max(1, _elements(few)))


@torch.no_grad()
def layer_by_layer(
    model: nn.Module, inputs: Inputs, order: LayerOrder, exchange: Exchange, memory: int, forward: Forward = called
) -> dict[str, Moments]:
    """Measure the moments of every BatchNorm layer's input over all batches.

    While a layer is measured, the layers before it normalise with the cohort's exact statistics. ``model`` stays
    unchanged. At the end the client leaves the ``exchange``.

    Args:
        model: The network.
        inputs: A function that returns the batches of inputs, the same in every call.
        order: The order of its layers.
        exchange: The exchange with the cohort.
        memory: Bytes of activations that may be kept.
        forward: A function that runs the network on a batch.

    Raises:
        ExchangeFailed: The cohort's exchange failed, or the batches take different ways through the network.
    """
    by_layer: dict[str, Moments] = {}
    layers, own, dtype = exchanged_layers(model), batch_norms(model), inputs_like(model).dtype
    before = {name: (own[name].running_mean.clone(), own[name].running_var.clone()) for name in layers}  # type: ignore[union-attr]
    try:
        with _steps(model, inputs, order, memory, forward) as step:
            while (reached := step(by_layer)) is not None:
                name, moments = reached
                by_layer[name] = moments
                local = torch.cat([moments.mean, moments.var]).to(dtype).to(layers[name].dtype)  # rounded as in a reply
                answer = exchange(Key(name, Quantity.STATISTICS), local, moments.count)
                if answer.count > 1:  # one value has no unbiased variance: the statistics stay as they are
                    _set(own[name], *answer.values.chunk(2))
        exchange.close()
    except BaseException as error:
        exchange.close(repr(error))
        raise
    finally:
        for name, statistics in before.items():
            _set(own[name], *statistics)
    return by_layer


Step = Callable[[Mapping[str, Moments]], LayerMoments | None]
"""Runs all batches up to the first layer without moments. Returns this layer and its moments; None after the last layer."""


@contextmanager
def _steps(model: nn.Module, inputs: Inputs, order: LayerOrder, memory: int, forward: Forward) -> Iterator[Step]:
    kept = _kept(model, inputs, order, memory, forward)
    if kept is None:
        LOGGER.info(
            "the activations need more than %.3g GiB (recalibration-memory), so every layer takes a forward pass of its own", memory / 2**30
        )
        yield partial(_repeated, model, inputs, forward)
        return
    try:
        with _watched(model, _stop_thread):
            yield lambda by_layer: _together([one.go_on() for one in kept], by_layer)
    finally:
        for one in kept:
            one.end()


def _kept(model: nn.Module, inputs: Inputs, order: LayerOrder, memory: int, forward: Forward) -> list[_Pass] | None:
    """Return a forward pass for each batch, not yet started. None if their activations need more than ``memory``."""
    held, kept = 0.0, list[_Pass]()
    for x in inputs():
        held += order.held * _elements(x)
        if held > memory:
            return None
        kept.append(_Pass(partial(forward, model, x)))
    return kept


def _repeated(model: nn.Module, inputs: Inputs, forward: Forward, by_layer: Mapping[str, Moments]) -> LayerMoments | None:
    """Run every batch to the first layer that ``by_layer`` lacks, and return this layer's moments; None: no layer is left."""
    at: list[LayerMoments | None] = []
    passed: set[str] = set()

    def reached(layer: str, x: Tensor) -> None:
        if layer in passed:
            raise _twice(layer)
        passed.add(layer)
        if layer not in by_layer:
            at[-1] = layer, Moments.of(x)
            raise _Stop

    with _watched(model, reached):
        for x in inputs():
            at.append(None)
            passed.clear()
            with suppress(_Stop):
                forward(model, x)
    return _together(at, by_layer)


def _together(at: list[LayerMoments | None], by_layer: Mapping[str, Moments]) -> LayerMoments | None:
    """Return the layer that all batches have reached, and its moments over all of them. None at the end of the network."""
    if not any(at):
        return None
    layers = {None if one is None else one[0] for one in at}
    name = layers.pop()
    if layers or name is None:
        raise ExchangeFailed("this network has no order of BatchNorm layers: its batches differ in which of them runs next")
    if name in by_layer:
        raise _twice(name)
    return name, pool([one[1] for one in at if one is not None])


def _twice(layer: str) -> ExchangeFailed:
    return ExchangeFailed(f"this network has no order of BatchNorm layers: it uses layer {layer!r} more than once")


class _Stop(BaseException):
    """End a forward pass early. It is not an ``Exception``, because a network's own code may catch those."""


class _Pass(threading.Thread):
    """Run the forward pass of one batch in a thread. It runs only during ``go_on``, and pauses where it calls ``stop``."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        super().__init__(name="forward-pass", daemon=True)
        self._forward: Callable[[], Any] | None = forward
        self._going, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._at: LayerMoments | None = None
        self._error: BaseException | None = None
        self._over = False

    def go_on(self) -> LayerMoments | None:
        """Run until the next stop. Return the layer there and its moments; None at the end. Raise an error of the pass."""
        self._at = None
        if not self._over:
            if self.ident is None:
                self.start()
            self._going.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._at

    def stop(self, at: LayerMoments) -> None:
        """Wait at a layer until the next ``go_on``."""
        self._at = at
        self._stopped.release()
        self._going.acquire()
        if self._over:
            raise _Stop

    def end(self) -> None:
        """End the pass at the layer where it is."""
        self._over, self._forward = True, None
        if self.ident is not None:
            self._going.release()
            self.join()

    @torch.no_grad()
    def run(self) -> None:
        """Run the pass in its own thread."""
        self._going.acquire()
        forward, self._forward = self._forward, None
        try:
            if forward is not None:
                forward()
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self._stopped.release()


def _stop_thread(layer: str, x: Tensor) -> None:
    thread = threading.current_thread()
    assert isinstance(thread, _Pass), "a forward pass of another thread"
    thread.stop((layer, Moments.of(x)))


@contextmanager
def _watched(model: nn.Module, reached: Reached) -> Iterator[None]:
    """Put ``model`` into evaluation mode; call ``reached(layer, x)`` at the input ``x`` of each layer with statistics."""
    training = {module: module.training for module in model.modules()}

    def hook(name: str, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        reached(name, *args, *named.values())

    held = held_layers(model)
    layers = {name: layer for name, layer in batch_norms(model).items() if layer.running_mean is not None and name not in held}
    handles = [layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name, layer in layers.items()]
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode


def _set(layer: Any, mean: Tensor, var: Tensor) -> None:
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)


def _elements(x: Any) -> int:
    return sum(part.numel() for part in tensors_in(x))
