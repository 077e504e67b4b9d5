"""Define callbacks, whose methods a run calls at its start and end, and after rounds and evaluations."""

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
        arrays: A function that returns a copy of the shared tensors as evaluated last, by their names in your
            network's state_dict. In a round without an evaluation, they are those of the round, except under HBN and static BN.
            Load the copy with ``load_state_dict``. Tensors that clients keep are missing. If there are such tensors, load with
            ``strict=False``.
        clients: A function that returns client -> all tensors of its own network, if clients keep tensors and are
            in this process. Otherwise it returns an empty dict. Clients of a Flower app do not send their own tensors.
        history: The records of earlier rounds, if the run continues an earlier one.
        reason: The reason why the run ends early; empty if it does not.
    """

    task: Task
    arrays: Callable[[], Mapping[str, Tensor]]
    clients: Callable[[], Mapping[int, Mapping[str, Tensor]]] = _no_client
    history: Sequence[RoundRecord] = ()
    reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after this round. The run's metrics are those of the last evaluation.

        The model is that of this round. But under HBN and static BN, which measure statistics only before an evaluation, it is
        the model as evaluated last.

        Args:
            reason: The reason, for the log. If there are several, the first one is kept.
        """
        self.reason = self.reason or reason


class Callback:
    """Serve as the base class of callbacks. Its methods do nothing. An error in a method ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_start(self, running: Running) -> None:
        """Handle the start of the run, before its first round.

        Args:
            running: Gives the run's model now and at any later time, and can end the run.
        """

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Handle an evaluation, before ``on_round`` of the same round.

        Args:
            record: The round's record. Its ``evaluation`` has the metrics by name.
            rounds: The number of rounds of the whole run.
        """

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Handle the end of a round, even if the round failed.

        Args:
            record: The round's record.
            rounds: The number of rounds of the whole run.
        """

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of the run, once.

        Args:
            error: The error that ended the run early, such as ``KeyboardInterrupt`` for Ctrl-C. None: the run
                ended without an error.
        """


def checked_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return the ``callbacks`` of a run as a tuple.

    Raises:
        ValueError: ``callbacks`` is a single callback or no list, or an element is no callback.
    """
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ValueError(f"callbacks must be a list of callbacks, but got {_in_words(callbacks)}: give callbacks=[EarlyStop(3)], say")
    given = tuple(callbacks)  # a generator, too, has them once only
    if wrong := [one for one in given if not isinstance(one, Callback)]:
        raise ValueError(f"callbacks must be objects of subclasses of Callback, but got {wrong[0]!r}")
    return given


def _in_words(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a single {type(value).__name__}"


class Callbacks(Callback):
    """Combine several callbacks into one, which calls each of them in order.

    ``on_end`` calls them in the opposite order, and calls every callback even if another one raises an error.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.all = tuple(callbacks)

    def on_start(self, running: Running) -> None:
        """Call ``on_start`` of every callback."""
        for callback in self.all:
            callback.on_start(running)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation`` of every callback."""
        for callback in self.all:
            callback.on_evaluation(record, rounds)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation`` of every callback if the round was evaluated, then ``on_round`` of every callback."""
        if record.evaluation:
            self.on_evaluation(record, rounds)
        for callback in self.all:
            callback.on_round(record, rounds)

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Call ``on_end`` of every callback. This method takes the arguments of ``__exit__``, for an ``ExitStack``."""
        self.on_end(error)

    def on_end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of every callback, the last callback first."""
        with ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end, error)
