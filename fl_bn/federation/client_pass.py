"""Make a client's statistics pass: alone, or layer after layer with its cohort.

With the cohort, all batches of a client stop at a layer. The client sends the
moments of its input, and the batches go on with the cohort's statistics. So one
forward pass makes all layers exact, for which ``federation.passes`` needs one per
layer. The layers must run in one order, each once per batch, and all activations
must fit into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn

from fl_bn.bn.modules import held_layers, kept_modes
from fl_bn.bn.moments import Moments, Running, pool
from fl_bn.bn.roles import inputs_like
from fl_bn.exchange.call import Exchange, ExchangeFailed, Key, Quantity
from fl_bn.exchange.local import Turns
from fl_bn.exchange.session import exchanged_layers
from fl_bn.federation.aggregation import running_statistics, store_statistics
from fl_bn.federation.local import Forward, measured, unmoved
from fl_bn.federation.recording import Connect
from fl_bn.federation.schema import Locality
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import INPUTS, StatisticsPass
from fl_bn.task import Task, batch_size, tensors_in, to_device

LOGGER = logging.getLogger("flwr")
HELD = 3  # activations of a waiting forward pass over a BatchNorm layer's largest input: input, output, shortcut

Inputs = Callable[[], Iterable[Any]]
"""Returns the batches of inputs, the same in every call."""


class ClientPass:
    """Make the statistics pass of one client's round, and hold its result.

    It is the method's before training (HBN), or a statistics-only exchange's, which
    alone uses ``connect``.

    Attributes:
        how: What the pass measures, and on how many samples.
        moments: Layer -> measured moments, but of layers in evaluation mode; None
            before.
        samples: The number of samples in the pass.
    """

    def __init__(
        self,
        model: nn.Module,
        locality: Locality,
        instruction: Instruction,
        kept: ClientState,
        connect: Connect | None,
    ) -> None:
        self._model, self._layers, self._instruction = model, locality.shared_statistics, instruction
        self._connect = None if instruction.trains else connect
        self._unmeasured = locality.home_statistics if self._layers and not kept.get("local") else ()
        own = locality.method.statistics_pass
        self.how = own if instruction.trains else StatisticsPass.for_exchange(instruction.measured, own.samples)
        self.samples = 0
        self.moments: dict[str, Moments] | None = None

    def run(self, batches: Iterable[Any], task: Task) -> None:
        """Measure ``batches``, which ``task`` reads, and store the moments.

        A statistics-only exchange restores a DataLoader's generators, so that later
        batches stay the same.
        """
        if (self._connect is not None or self._unmeasured) and isinstance(batches, Iterator):
            batches = list(batches)  # they are gone through more than once
        with nullcontext() if self._instruction.trains else unmoved([batches]):
            self.measure(partial(self.inputs, batches, task), task.forward)

    def measure(self, inputs: Inputs, forward: Forward = call) -> None:
        """Measure and store each BatchNorm layer's moments over all batches of ``inputs()``.

        A client whose network has no fixed order of layers, or needs too much
        memory, leaves an exchange that goes layer by layer, and measures all layers
        in one pass.
        """
        with self.own_first(inputs, forward):
            if self._connect is not None:
                problem, batches = in_order(self._model, self._layers, inputs, forward, self._instruction.memory)
                exchange = self._connect(0 if problem else max(1, self.samples))
                if not problem:
                    self.moments = layer_by_layer(self._model, self._layers, batches, exchange, forward)
                    return
                exchange.close()
                LOGGER.warning("this client leaves the layer-wise exchange and measures all layers in one pass: %s", problem)
            self.moments = measured(self._model, inputs(), self.how, forward)

    @contextmanager
    def own_first(self, inputs: Inputs, forward: Forward = call) -> Iterator[None]:
        """Give layers with statistics at home those of the client's data, if it keeps none yet.

        Otherwise the layers behind them would see inputs that are not normalised.
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
        """Yield and count the inputs until the pass has as many samples as it needs."""
        device, most = inputs_like(self._model).device, self.how.samples
        self.samples = 0
        for batch in batches:
            x, y = task.read(batch)
            self.samples += batch_size(x, y)
            yield to_device(x, device)
            if 0 < most <= self.samples:
                return


@torch.no_grad()
def in_order(model: nn.Module, layers: Collection[str], inputs: Inputs, forward: Forward, memory: int) -> tuple[str, list[Any]]:
    """Tell why ``layers`` cannot be measured in order, if so, and return the batches.

    One forward pass finds out, with two samples of the first batch, or all unless
    it is a plain tensor. ``memory`` limits the bytes of waiting activations.
    """
    if (batch := next(iter(inputs()), None)) is None:
        return "there is no batch to measure", []
    few = batch[:2] if type(batch) is Tensor and batch.layout is torch.strided else batch
    order, sizes = list[str](), [0]

    def reached(layer: str, x: Tensor) -> None:
        order.append(layer)
        sizes.append(x.numel() * x.element_size())

    with _watched(model, layers, reached):
        forward(model, few)
    if not order:
        return "no BatchNorm layer runs", []
    if twice := [layer for place, layer in enumerate(order) if layer in order[:place]]:
        return f"the network uses BatchNorm layer {twice[0]!r} more than once", []
    own = sum(part.numel() * part.element_size() for part in tensors_in(few))
    held, elements, batches = (HELD * max(sizes) + own) / max(1, _elements(few)), 0, list[Any]()
    for x in inputs():  # once: the next iteration of a loader may draw other batches
        elements += _elements(x)
        if held * elements > memory:
            return f"the activations of all batches need more than {memory / 2**30:.3g} GiB", []
        batches.append(x)
    return "", batches


class _Batches(Turns):
    """Run the forward passes of a client's batches, which wait for all at each layer.

    ``answer`` exchanges a layer's moments with the cohort, and stores its
    statistics.
    """

    def __init__(self, batches: int, answer: Callable[[str, Moments], None]) -> None:
        super().__init__(batches)
        self._batches, self._answer = batches, answer
        self._at: dict[int, tuple[str, Moments]] = {}
        self.by_layer: dict[str, Moments] = {}
        self.error: BaseException | None = None

    def reached(self, layer: str, x: Tensor) -> None:
        """Wait at ``layer`` with the thread's input ``x``."""
        if not x.numel():  # an expert of a mixture may get no sample of a batch
            raise ExchangeFailed(f"layer {layer!r} got no sample of a batch, so batches reach the BatchNorm layers in no common order")
        _, index = Turns.here() or (None, -1)
        self._at[index] = layer, Moments.of(x)
        self.wait(index)
        if self.error is not None:
            raise self.error

    def all_wait(self) -> list[int]:
        """Exchange the moments of the layer at which all wait, and wake them."""
        try:
            self._exchange()
        except BaseException as error:  # every batch raises it
            self.error = error
        waiting, self._at = list(self._at), {}
        return waiting

    def _exchange(self) -> None:
        if self.error is not None:
            raise self.error
        names = {name for name, _ in self._at.values()}
        if len(self._at) < self._batches or len(names) > 1 or (name := names.pop()) in self.by_layer:
            raise ExchangeFailed(
                "the BatchNorm layers of this network have no fixed order: its batches reach different layers next, or a layer twice"
            )
        moments = pool([self._at[index][1] for index in range(self._batches)])
        self.by_layer[name] = moments
        self._answer(name, moments)


@torch.no_grad()
def layer_by_layer(
    model: nn.Module, layers: Collection[str], batches: Sequence[Any], exchange: Exchange, forward: Forward = call
) -> dict[str, Moments]:
    """Measure the moments of the input of each of ``layers`` over this client's batches.

    The layers before normalise with the cohort's exact statistics. ``in_order``
    must have found no problem. At the end the client leaves the ``exchange``.

    Raises:
        ExchangeFailed: The exchange failed, or batches take different ways through
            the network.
    """
    exchanged = exchanged_layers(model, layers)
    before = running_statistics(model, exchanged)

    def answer(name: str, moments: Moments) -> None:
        local = torch.cat([moments.mean, moments.var]).to(exchanged[name].dtype)  # rounded as in a reply
        got = exchange(Key(name, Quantity.STATISTICS), local, moments.count)
        if got.count > 1:  # one value has no unbiased variance: the statistics stay as they are
            store_statistics(model, {name: Running(*got.values.chunk(2))})

    @torch.no_grad()  # in the thread of a batch
    def run(x: Any) -> None:
        forward(model, x)

    running = _Batches(len(batches), answer)
    try:
        with _watched(model, layers, running.reached):
            running.run([partial(run, x) for x in batches])
        if running.error is not None:  # the network's own code may catch it
            raise running.error
        exchange.close()
    except BaseException as error:
        exchange.close(repr(error))
        raise
    finally:
        store_statistics(model, before)
    return running.by_layer


@contextmanager
def _watched(model: nn.Module, layers: Collection[str], reached: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Put ``model`` into evaluation mode, and call ``reached(layer, x)`` before each layer."""

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
