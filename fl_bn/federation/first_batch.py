"""Store the size of a round's first batch, and run FedTAN's layer-wise exchange, which takes place during this batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn

from fl_bn.bn.observation import in_backward
from fl_bn.exchange.call import Exchange
from fl_bn.methods.fedtan import exchanging

Connect = Callable[[int], Exchange]
"""``connect(batch)`` joins the layer-wise exchange with a batch of ``batch`` samples, and returns the client's ``Exchange``."""


class Batch(int):
    """Hold the number of samples of a round's first batch. Call this integer to set the number: ``round.batch(32)``."""

    say: Callable[[int], None]

    @classmethod
    def of(cls, samples: int, say: Callable[[int], None]) -> Batch:
        """Make an integer of value ``samples`` that can also be called to announce the true number.

        Args:
            samples: The number of samples that is known so far; 0: it is unknown.
            say: Stores the announced number. If ``batch`` is the returned integer, ``batch(32)`` calls ``say(32)``. The integer
                keeps its value.
        """
        new = cls(samples)
        new.say = say
        return new

    def __call__(self, samples: int) -> None:
        """Set the number of samples of the first batch to ``samples``."""
        self.say(samples)


class FirstBatch:
    """Hold the size of a round's first batch, and the layer-wise exchange of that batch. The end of a ``with`` block ends the exchange.

    Args:
        model: The network whose layers exchange statistics.
        connect: Joins the exchange, see ``Connect``; None: the round has no exchange.

    Attributes:
        samples: The number of samples in the first batch; 0 as long as it is unknown.
        waited: Seconds that the client waited for answers in the exchange.
    """

    def __init__(self, model: nn.Module, connect: Connect | None) -> None:
        self.samples = 0
        self.waited = 0.0
        self._model, self._connect, self._exchange = model, connect, ExitStack()

    def __enter__(self) -> FirstBatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool | None:
        return self._exchange.__exit__(kind, error, trace)

    def begin(self, samples: int, steps: int) -> None:
        """Begin the round's first batch: store its number of samples, and join the layer-wise exchange if there is one.

        Call this before the first forward pass in training mode. If there is an exchange, the BatchNorm layers exchange
        statistics in that pass, and the server weights this client's reply by ``samples``.

        Args:
            samples: The number of samples of the first batch.
            steps: The number of local steps that the round has already made. It must be 0.

        Raises:
            ValueError: ``samples`` is below 1, the first step is over, or the client has already joined the
                exchange.
        """
        if samples < 1:
            raise ValueError(f"a batch has at least 1 sample, but got round.batch({samples})")
        if steps:
            raise ValueError("round.batch(n) sets the size of the first batch, but the first step is over: call it before the first step")
        if self.samples and self._connect is not None:
            raise ValueError(
                f"this client has already joined its cohort's exchange with a batch of {self.samples} samples: call round.batch once, "
                "before the first forward pass in training mode"
            )
        self.samples = samples
        if self._connect is not None:
            self._live = self._connect(samples)
            self._exchange.enter_context(exchanging(self._model, self._live))

    def end(self, method: str) -> None:
        """End the exchange, if there is one. Call this when the gradient of the first batch is complete.

        If an optimiser steps inside the backward pass, the exchange ends after this pass.

        Args:
            method: The method's name, for the error message.

        Raises:
            ValueError: The client has not joined the exchange, because ``round.model`` made no training forward pass.
        """
        if self._connect is None:
            return
        if not self.samples:
            raise ValueError(
                f"in {method}'s first step, round.model exchanges statistics with the cohort during a forward pass in training mode with "
                "gradients, but there was no such pass: train round.model itself, not a copy, and checkpoint activations with "
                "use_reentrant=False"
            )
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
        else:
            self._close()

    def _close(self) -> None:
        self._exchange.close()
        self.waited = self._live.seconds
