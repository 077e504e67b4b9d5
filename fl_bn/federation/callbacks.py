"""Call back displays, files and trackers as a run goes on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from fl_bn.federation.record import RoundRecord


class Callback:
    """Derive from this class, and write the methods that you need; each does nothing by default.

    ``rounds`` is the planned number of rounds. An error that a method raises ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Handle an evaluated round, before its ``on_round``; ``record.evaluation`` has the metrics by name."""

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Handle a finished round, also a failed one."""

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of the run, once.

        Args:
            error: The error that ended the run early (``KeyboardInterrupt`` for Ctrl-C); None after the last round.
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
