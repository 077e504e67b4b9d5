"""Make a client's statistics pass in a round: alone, or one layer after the other with its cohort.

In a pass with the cohort, all batches of a client stop at a layer. The client sends the moments of the layer's input, and gets the
cohort's statistics (one exchange). Its batches continue with these statistics. So one forward pass makes all layers exact, for which
``federation.passes`` needs one for each layer.

The layers must run in one order in every batch, each of them once. A network that uses a layer twice has no such order.
Neither has a network whose batches take different ways through it. For such networks, and if the activations of all batches do not fit
into memory, there is ``federation.passes``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from fl_bn.federation.local import Forward, called, measured, unmoved
from fl_bn.federation.locality import Locality
from fl_bn.federation.recording import Connect
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import INPUTS, StatisticsPass
from fl_bn.task import Task, batch_size, tensors_in, to_device

LOGGER = logging.getLogger("flwr")
HELD = 3  # activations of a waiting forward pass, as a multiple of a BatchNorm layer's largest input: input, output and a shortcut

Inputs = Callable[[], Iterable[Any]]
"""Returns the batches of inputs, the same in every call."""
Reached = Callable[[str, Tensor], None]
LayerMoments = tuple[str, Moments]
"""A layer, and the moments of its input."""


class ClientPass:
    """Make the statistics pass of one client's round, and hold its result.

    In a training round, the pass is the one that the method makes before training (HBN). Otherwise the pass is the client's
    part of a statistics-only exchange, and all that the client does in the round.

    Args:
        model: The network. It stays unchanged.
        locality: Where its tensors live.
        instruction: The server's instruction.
        kept: The state that the client keeps.
        connect: Joins an exchange with the cohort, see ``LocalRound``. Only a statistics-only exchange uses it.

    Attributes:
        how: What the pass measures, and on how many samples.
        moments: Layer -> the measured moments, without layers held in evaluation mode. None before the pass.
        samples: The number of samples in the pass; 0 before it.
    """

    def __init__(self, model: nn.Module, locality: Locality, instruction: Instruction, kept: ClientState, connect: Connect | None) -> None:
        self._model, self._layers, self._instruction = model, locality.shared_statistics, instruction
        self._connect = None if instruction.trains else connect
        self._unmeasured = locality.home_statistics if self._layers and not kept.get("local") else ()
        own = locality.method.statistics_pass
        self.how = own if instruction.trains else StatisticsPass.for_exchange(instruction.measured, own.samples)
        self.samples = 0
        self.moments: dict[str, Moments] | None = None

    def run(self, batches: Iterable[Any], task: Task) -> None:
        """Measure ``batches``, and store the moments.

        In a statistics-only exchange, the generators of a DataLoader are restored afterwards. So it does not change which
        batches the next training round draws.

        Args:
            batches: Batches, in a form that ``task`` reads.
            task: Reads the inputs of a batch.
        """
        if (self._connect is not None or self._unmeasured) and isinstance(batches, Iterator):
            batches = list(batches)  # they are gone through more than once
        with nullcontext() if self._instruction.trains else unmoved([batches]):
            self.measure(partial(self.inputs, batches, task), task.forward)

    def measure(self, inputs: Inputs, forward: Forward = called) -> None:
        """Measure the moments of each BatchNorm layer over all batches of ``inputs()``, and store them.

        In a statistics-only exchange that goes layer by layer, the client exchanges the statistics of each layer with
        the cohort. If the network has no fixed order of layers, or its activations need too much memory, the client leaves the exchange
        and measures all layers in one pass.

        Args:
            inputs: Returns the batches of inputs, the same in every call.
            forward: Runs the network on a batch of inputs.
        """
        with self.own_first(inputs, forward):
            if self._connect is not None:
                order = LayerOrder.at(self._model, self._layers, inputs, forward, self._instruction.memory)
                exchange = self._connect(0 if order.problem else 1)
                if not order.problem:
                    self.moments = layer_by_layer(self._model, order, exchange, forward)
                    return
                exchange.close()
                LOGGER.warning("this client leaves the layer-wise exchange and measures all layers in one pass: %s", order.problem)
            self.moments = measured(self._model, inputs(), self.how, forward)

    @contextmanager
    def own_first(self, inputs: Inputs, forward: Forward = called) -> Iterator[None]:
        """Give layers whose statistics stay at home those of this client's data in the ``with`` block, if the client keeps none yet.

        Other layers are measured behind them, and would see what no training batch looks like: such a batch normalises itself.

        Args:
            inputs: Returns the batches of inputs.
            forward: Runs the network on a batch of inputs.
        """
        before, how = running_statistics(self._model, self._unmeasured), StatisticsPass.for_exchange(INPUTS)
        try:
            for name in self._unmeasured:  # in order, so that each is measured behind those before it
                if (own := measured(self._model, inputs(), how, forward).get(name)) is not None and own.count > 1:
                    store_statistics(self._model, {name: Running(own.mean, own.bessel())})
            yield
        finally:
            store_statistics(self._model, before)

    def inputs(self, batches: Iterable[Any], task: Task) -> Iterator[Any]:
        """Yield the inputs of each batch, until the batches have as many samples as the pass needs. Count these samples.

        Args:
            batches: Batches, in a form that ``task`` reads.
            task: Reads the inputs of a batch.
        """
        device, most = inputs_like(self._model).device, self.how.samples
        self.samples = 0
        for batch in batches:
            x, y = task.read(batch)
            self.samples += batch_size(x, y)
            yield to_device(x, device)
            if 0 < most <= self.samples:
                return


@dataclass(frozen=True)
class LayerOrder:
    """Tell whether a network's BatchNorm layers can be measured one after the other, and how much memory this takes.

    Attributes:
        problem: The reason why the layers cannot be measured one after the other; empty if they can.
        layers: The names of the layers to measure.
        batches: The batches of inputs.
    """

    problem: str
    layers: Collection[str] = ()
    batches: Sequence[Any] = ()

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
        held, elements, batches = (HELD * largest + own) / max(1, _elements(few)), 0, list[Any]()
        for x in inputs():  # once: the next iteration of a loader may draw other batches
            elements += _elements(x)
            if held * elements > memory:
                return cls(f"the activations of all batches need more than {memory / 2**30:.3g} GiB")
            batches.append(x)
        return cls("", layers, batches)


@torch.no_grad()
def layer_by_layer(model: nn.Module, order: LayerOrder, exchange: Exchange, forward: Forward = called) -> dict[str, Moments]:
    """Measure the moments of the input of each layer in ``order.layers`` over all batches.

    While a layer is measured, the layers before it normalise with the cohort's exact statistics. ``model`` stays
    unchanged. At the end the client leaves the ``exchange``.

    Args:
        model: The network.
        order: The result of ``LayerOrder.at``, without a problem.
        exchange: The exchange with the cohort.
        forward: A function that runs the network on a batch.

    Returns:
        Layer -> the moments of its input over this client's batches.

    Raises:
        ExchangeFailed: The cohort's exchange failed, or the batches take different ways through the network.
    """
    by_layer: dict[str, Moments] = {}
    exchanged, dtype = exchanged_layers(model, order.layers), inputs_like(model).dtype
    before = running_statistics(model, exchanged)
    passes = [_Pass(partial(forward, model, x)) for x in order.batches]
    try:
        with _watched(model, order.layers, _stop_thread):
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
