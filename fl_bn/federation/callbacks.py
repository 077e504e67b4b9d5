"""Callbacks, which are called during a run. Displays, files and trackers follow the rounds by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from fl_bn.federation.record import RoundRecord
from fl_bn.task import Task


def _no_client() -> dict[int, dict[str, Tensor]]:
    return {}


@dataclass
class Running:
    """Give callbacks a run's model, and let them end the run.

    Attributes:
        task: The task whose metrics are evaluated.
        arrays: Returns a copy of the shared model as evaluated last, by the names of your network's
            state_dict. ``load_state_dict`` takes it; where clients keep tensors, these are missing, so load with
            ``strict=False``.
        clients: Returns client -> its own network, whole, where clients keep tensors and are in this process.
            Otherwise there are none: a client of a Flower app keeps its tensors to itself.
        history: The records of the rounds before ``on_start``, of a run that continues.
        reason: Why the run ends early; empty if it does not.
    """

    task: Task
    arrays: Callable[[], Mapping[str, Tensor]]
    clients: Callable[[], Mapping[int, Mapping[str, Tensor]]] = _no_client
    history: Sequence[RoundRecord] = ()
    reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after this round. Its results are those of the last evaluation.

        Args:
            reason: Why, for the log. The first reason counts.
        """
        self.reason = self.reason or reason


class Callback:
    """Base class of callbacks, whose methods do nothing. An error in a method ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_start(self, running: Running) -> None:
        """Handle the start of the run, before its first round.

        Args:
            running: has the model at any later time, and ends the run.
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

    def on_start(self, running: Running) -> None:
        """Call ``on_start`` of each."""
        for callback in self.all:
            callback.on_start(running)

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

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Call ``on_end`` of each at the end of a ``with`` block."""
        self.on_end(error)

    def on_end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of each."""
        with ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end, error)
