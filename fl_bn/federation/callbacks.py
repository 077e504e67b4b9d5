"""Callbacks, which are called during a run. Displays, files and trackers follow the rounds by them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from fl_bn.federation.record import RoundRecord


class Callback:
    """Base class of callbacks, whose methods do nothing. An error in a method ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Handle an evaluation, before ``on_round`` of the same round.

        Args:
            record: its ``evaluation`` has the metrics by name.
            rounds: of the whole run.
        """

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Handle the end of a round, also of a failed one.

        Args:
            record: of the round.
            rounds: of the whole run.
        """

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of the run, once.

        Args:
            error: the error that ended the run early, ``KeyboardInterrupt`` for Ctrl-C. None: the run is
                complete.
        """


class Callbacks(Callback):
    """Combine several callbacks to one; they are called in order.

    At the end every one is called, even if another one raises.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.all = tuple(callbacks)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation`` of each."""
        for callback in self.all:
            callback.on_evaluation(record, rounds)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation`` first if the round was evaluated, then ``on_round`` of each."""
        if record.evaluation:
            self.on_evaluation(record, rounds)
        for callback in self.all:
            callback.on_round(record, rounds)

    def on_end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of each."""
        with ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end, error)
