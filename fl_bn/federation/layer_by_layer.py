"""Measure exact statistics of every BatchNorm layer in one forward pass: the clients measure one layer after the other.

The module ``federation.passes`` gives the same numbers, but needs one forward pass for each layer. In this module, all
batches of a client stop at a layer. The client sends the moments of the layer's input, and gets the cohort's statistics
(one exchange). Its batches continue with these statistics. So nothing is computed twice.

The layers must run in one order in every batch, each of them once. A network that uses a layer twice has no such order.
Neither has a network whose batches take different ways through it. For such networks, and if the activations of all batches do not fit
into memory, use ``federation.passes``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_bn.bn.modes import held_layers, kept_modes
from fl_bn.bn.moments import Moments, Running, pool
from fl_bn.bn.roles import inputs_like
from fl_bn.exchange.call import Exchange, ExchangeFailed, Key, Quantity
from fl_bn.exchange.session import exchanged_layers
from fl_bn.federation.aggregation import running_statistics, store_statistics
from fl_bn.task import tensors_in

HELD = 3  # activations of a waiting forward pass, as a multiple of a BatchNorm layer's largest input: input, output and a shortcut

Inputs = Callable[[], Iterable[Any]]
"""Returns the batches of inputs, the same in every call."""
Forward = Callable[[nn.Module, Any], Any]
Reached = Callable[[str, Tensor], None]
LayerMoments = tuple[str, Moments]
"""A layer, and the moments of its input."""


def called(model: nn.Module, x: Any) -> Any:
    """Return ``model(x)``. This is the default of the arguments named ``forward`` in this module."""
    return model(x)


@dataclass(frozen=True)
class LayerOrder:
    """Tell whether a network's BatchNorm layers can be measured one after the other, and how much memory this takes.

    Attributes:
        problem: The reason why the layers cannot be measured one after the other; empty if they can.
        layers: The names of the layers to measure.
    """

    problem: str
    layers: Collection[str] = ()

    @classmethod
    @torch.no_grad()
    def at(cls, model: nn.Module, layers: Collection[str], inputs: Inputs, forward: Forward, memory: int) -> LayerOrder:
        """Make the ``LayerOrder`` of BatchNorm layers of ``model`` by one forward pass. ``model`` stays unchanged.

        The pass takes two samples of the first batch. If a batch is not a single tensor of torch's own class, the pass takes the
        whole batch.

        Args:
            model: The network.
            layers: The names of the layers to measure.
            inputs: A function that returns the batches of inputs.
            forward: A function that runs the network on a batch.
            memory: The largest number of bytes of activations to keep while batches wait at a layer.
        """
        batch = next(iter(inputs()), None)
        if batch is None:
            return cls("there is no batch to measure")
        few = batch[:2] if type(batch) is Tensor else batch
        order, largest = list[str](), 0

        def reached(layer: str, x: Tensor) -> None:
            nonlocal largest
            order.append(layer)
            largest = max(largest, x.numel() * x.element_size())

        with _watched(model, layers, reached):
            forward(model, few)
        if not order:
            return cls("no BatchNorm layer runs")
        if twice := [layer for place, layer in enumerate(order) if layer in order[:place]]:
            return cls(f"the network uses BatchNorm layer {twice[0]!r} more than once")
        own = sum(part.numel() * part.element_size() for part in tensors_in(few))
        held, elements = (HELD * largest + own) / max(1, _elements(few)), 0
        for x in inputs():
            elements += _elements(x)
            if held * elements > memory:
                return cls(f"the activations of all batches need more than {memory / 2**30:.3g} GiB (recalibration-memory)")
        return cls("", layers)


@torch.no_grad()
def layer_by_layer(
    model: nn.Module, inputs: Inputs, layers: Collection[str], exchange: Exchange, forward: Forward = called
) -> dict[str, Moments]:
    """Measure the moments of the input of each of the ``layers`` over all batches.

    While a layer is measured, the layers before it normalise with the cohort's exact statistics. ``model`` stays
    unchanged. At the end the client leaves the ``exchange``.

    Args:
        model: The network.
        inputs: A function that returns the batches of inputs, the same in every call.
        layers: The names of the layers, of a ``LayerOrder`` without a problem.
        exchange: The exchange with the cohort.
        forward: A function that runs the network on a batch.

    Returns:
        Layer -> the moments of its input over this client's batches.

    Raises:
        ExchangeFailed: The cohort's exchange failed, or the batches take different ways through the network.
    """
    by_layer: dict[str, Moments] = {}
    exchanged, dtype = exchanged_layers(model, layers), inputs_like(model).dtype
    before = running_statistics(model, exchanged)
    passes = [_Pass(partial(forward, model, x)) for x in inputs()]
    try:
        with _watched(model, layers, _stop_thread):
            while (reached := _together([one.go_on() for one in passes], by_layer)) is not None:
                name, moments = reached
                by_layer[name] = moments
                local = torch.cat([moments.mean, moments.var]).to(dtype).to(exchanged[name].dtype)  # rounded as in a reply
                answer = exchange(Key(name, Quantity.STATISTICS), local, moments.count)
                if answer.count > 1:  # one value has no unbiased variance: the statistics stay as they are
                    store_statistics(model, {name: Running(*answer.values.chunk(2))})
        exchange.close()
    except BaseException as error:
        exchange.close(repr(error))
        raise
    finally:
        for one in passes:
            one.end()
        store_statistics(model, before)
    return by_layer


def _together(at: list[LayerMoments | None], by_layer: Mapping[str, Moments]) -> LayerMoments | None:
    """Pool the batches' moments at the layer that all of them have reached.

    Args:
        at: For each batch, the layer that it reached, and the moments there; None at the end of the network.
        by_layer: The moments of the layers before.

    Returns:
        The layer and the pooled moments. None if all batches are at the end of the network.

    Raises:
        ExchangeFailed: The batches are at different layers, or at a layer that they reached before.
    """
    if not any(at):
        return None
    names = {None if one is None else one[0] for one in at}
    if len(names) > 1 or (name := names.pop()) is None or name in by_layer:
        raise ExchangeFailed(
            "the BatchNorm layers of this network have no fixed order: its batches reach different layers next, or a layer twice"
        )
    return name, pool([one[1] for one in at if one is not None])


class _Stop(BaseException):
    """End a forward pass early. This class is no ``Exception``, since a network's own code may catch every ``Exception``."""


class _Pass(threading.Thread):
    """Run the forward pass of one batch in a thread, which runs only while another thread waits in ``go_on``."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        super().__init__(name="forward-pass", daemon=True)
        self._forward: Callable[[], Any] | None = forward
        self._going, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._at: LayerMoments | None = None
        self._error: BaseException | None = None
        self._over = False

    def go_on(self) -> LayerMoments | None:
        """Run up to the next layer. Return its name and moments; None at the end. Raise an error that the pass raised."""
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
        """Pause the pass at the layer and moments ``at`` until the next ``go_on``. The pass itself calls this."""
        self._at = at
        self._stopped.release()
        self._going.acquire()
        if self._over:
            raise _Stop

    def end(self) -> None:
        """End the pass at the layer at which it waits. The layers after this one do not run."""
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
    assert isinstance(thread, _Pass), "the network ran its BatchNorm layer in a thread of its own"
    if not x.numel():  # an expert of a mixture may get no sample of a batch
        raise ExchangeFailed(f"layer {layer!r} got no sample of a batch, so batches reach the BatchNorm layers in no common order")
    thread.stop((layer, Moments.of(x)))


@contextmanager
def _watched(model: nn.Module, layers: Collection[str], reached: Reached) -> Iterator[None]:
    """Put ``model`` into evaluation mode for the ``with`` block; call ``reached(layer, x)`` before each of the ``layers`` runs."""

    def hook(name: str, layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        reached(name, *args, *named.values())

    held = held_layers(model)
    with ExitStack() as stack:
        for name in layers:
            if name not in held:
                layer = model.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True).remove)
        stack.enter_context(kept_modes(model))
        model.eval()
        yield


def _elements(x: Any) -> int:
    return sum(part.numel() for part in tensors_in(x))
