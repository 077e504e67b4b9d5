"""Make a client's statistics pass in a round: alone, or one layer after the other with its cohort."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.roles import inputs_like
from fl_bn.federation.aggregation import running_statistics, store_statistics
from fl_bn.federation.layer_by_layer import Forward, Inputs, LayerOrder, called, layer_by_layer
from fl_bn.federation.local import measured, unmoved
from fl_bn.federation.locality import Locality
from fl_bn.federation.recording import Connect
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import INPUTS, StatisticsPass
from fl_bn.task import Task, batch_size, to_device

LOGGER = logging.getLogger("flwr")


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
                    self.moments = layer_by_layer(self._model, inputs, order.layers, exchange, forward)
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
