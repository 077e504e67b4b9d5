"""Callbacks are called as a run goes on. Displays, files and trackers all hear of its rounds this way."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from fl_bn.federation.record import RoundRecord


class Callback:
    """Derive from it, and write the methods that you need: each does nothing of itself.

    ``rounds`` is how many there are to be. What a method raises ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """After a round that was evaluated, before its ``on_round``. ``record.evaluation`` has the metrics by name."""

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """After every round, a failed one, too."""

    def on_end(self, error: BaseException | None) -> None:
        """Once, after the last round. ``error``: what ended the run early, ``KeyboardInterrupt`` for Ctrl-C; None: it ran to its end."""


class Callbacks(Callback):
    """Several as one, called in their order. At the end every one is called, also where another raises."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.all = tuple(callbacks)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        for callback in self.all:
            callback.on_evaluation(record, rounds)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation`` first if the round was evaluated."""
        if record.evaluation:
            self.on_evaluation(record, rounds)
        for callback in self.all:
            callback.on_round(record, rounds)

    def on_end(self, error: BaseException | None) -> None:
        with ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end, error)
