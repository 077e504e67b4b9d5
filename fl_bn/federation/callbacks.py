"""Define callbacks, which a run calls at its start and end, after rounds and evaluations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fl_bn.federation.record import RoundRecord
from fl_bn.support import durable
from fl_bn.task import Task
from fl_bn.task.metrics import lower_is_better

LOGGER = logging.getLogger("flwr")


@dataclass
class Running:
    """Give callbacks a run's model, and let them end the run.

    Attributes:
        task: The task whose metrics are evaluated.
        arrays: Returns a copy of the shared tensors as evaluated last, by their
            names in your network's state_dict. In a round without an evaluation,
            they are the round's, except under HBN and static BN. Tensors that
            clients keep are missing: load the copy with ``strict=False``.
        clients: Returns client -> all tensors of its own network, if clients keep
            tensors and are in this process, else an empty dict.
        history: The earlier rounds' records, in a continued run.
    """

    task: Task
    arrays: Callable[[], Mapping[str, Tensor]]
    clients: Callable[[], Mapping[int, Mapping[str, Tensor]]] = dict
    history: Sequence[RoundRecord] = ()
    reason: str = ""

    def stop(self, reason: str) -> None:
        """End the run after this round, with the metrics of the last evaluation.

        The model is that of this round, but under HBN and static BN as evaluated
        last. Of several reasons, the log has the first one.
        """
        self.reason = self.reason or reason


class Callback:
    """Serve as the base class of callbacks, whose methods do nothing. An error in one ends the run.

    >>> from fl_bn import Callback
    >>> class Loss(Callback):
    ...     def on_round(self, record, rounds):
    ...         print(f"{record.round}/{rounds}: {record.loss:.3f}")
    """

    def on_start(self, running: Running) -> None:
        """Handle the start of the run. ``running`` has its model at any time, and can end it."""

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Handle an evaluation, before ``on_round`` of the same round.

        Args:
            record: The round's record, with the metrics in ``evaluation``.
            rounds: The whole run's number of rounds.
        """

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Handle the end of a round, even a failed one, of ``rounds`` rounds."""

    def on_end(self, error: BaseException | None) -> None:
        """Handle the end of the run, once.

        Args:
            error: The error that ended the run early, if any, such as
                ``KeyboardInterrupt`` for Ctrl-C.
        """


def checked_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return a run's ``callbacks`` as a tuple, or raise ValueError if they are no callbacks."""
    given = tuple(callbacks) if isinstance(callbacks, Iterable) else (None,)  # a generator, too, has them once only
    if not all(isinstance(one, Callback) for one in given):
        raise ValueError(f"callbacks must be a list of objects of subclasses of Callback, such as [EarlyStop(3)], but got {callbacks!r}")
    return given


class Callbacks(Callback):
    """Combine callbacks into one, which calls each in order.

    ``on_end`` calls them in the opposite order, each even after an error.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.all = tuple(callbacks)

    def on_start(self, running: Running) -> None:
        """Call ``on_start`` of every callback."""
        for callback in self.all:
            callback.on_start(running)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Call ``on_evaluation``, if there was one, then ``on_round``, of all."""
        for callback in self.all if record.evaluation else ():
            callback.on_evaluation(record, rounds)
        for callback in self.all:
            callback.on_round(record, rounds)

    def on_end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of every callback in opposite order."""
        with ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end, error)


class Best(Callback):
    """Follow a metric's best value over a run, for ``EarlyStop`` and ``KeepBest``.

    Args:
        metric: The metric. Default: the task's own, such as ``accuracy``.
        higher_is_better: Default: as the task declares for its own metric. For
            another one, lower is better if its name contains ``loss``, ``error`` or
            the like, as in ``eval_loss``.
        least: By how much an evaluation must improve the best value to count as
            better, a number >= 0.

    Attributes:
        best: The best finite value so far; NaN before.
        round: The round of the best value; 0 before.
        since: The number of evaluations since the best one.
    """

    def __init__(self, metric: str = "", higher_is_better: bool | None = None, least: float = 0.0) -> None:
        if not 0 <= least < math.inf:
            raise ValueError(f"least (by how much an evaluation must be better) must be finite and >= 0, but got {least}")
        self.metric, self._higher, self._least = metric, higher_is_better, least
        self.best, self.round, self.since = math.nan, 0, 0

    def on_start(self, running: Running) -> None:
        """Begin without a best result or, in a continued run, with its evaluations."""
        task = running.task
        self.running, self.name = running, self.metric or task.metric
        by_name = task.higher_is_better if self.name == task.metric else not lower_is_better(self.name)
        self.higher = by_name if self._higher is None else self._higher
        self.best, self.round, self.since = math.nan, 0, 0
        for record in running.history:
            if record.evaluation:
                self.better(record)

    def on_end(self, error: BaseException | None) -> None:
        """Warn if no round was evaluated."""
        if not self.round and not self.since:
            LOGGER.warning("%s had no effect, because no round was evaluated", type(self).__name__)

    def better(self, record: RoundRecord) -> bool:
        """Tell whether an evaluation is the best so far, and store it.

        Raises:
            ValueError: The evaluation does not have the metric.
        """
        if self.name not in record.evaluation:
            if self.round or self.since:
                return False  # some clients' evaluation may be missing in a round
            known = ", ".join(record.evaluation)
            raise ValueError(f"{type(self).__name__} needs the metric {self.name!r}, but round {record.round} has {known}")
        value = record.evaluation[self.name]
        ahead = value - self.best if self.higher else self.best - value
        if math.isfinite(value) and (self.round == 0 or ahead > self._least):
            self.best, self.round, self.since = value, record.round, 0
            return True
        self.since += 1
        return False


class EarlyStop(Best):
    """End a run whose evaluations no longer improve.

    >>> from fl_bn import EarlyStop
    >>> stop = EarlyStop(patience=3, metric="loss")  # Federation(..., callbacks=[stop])

    Args:
        patience: So many evaluations in a row without a better value end the run;
            at least 1.
        metric: The metric. Default: the task's own.
        higher_is_better: Default: as the task declares, or by the metric's name,
            see ``Best``.
        least: By how much an evaluation must improve the best value to count as
            better, a number >= 0.

    Raises:
        ValueError: ``patience`` is below 1, or ``least`` is negative or not finite.
    """

    def __init__(self, patience: int, metric: str = "", higher_is_better: bool | None = None, least: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience, the evaluations without improvement after which a run ends, must be >= 1, but got {patience}")
        super().__init__(metric, higher_is_better, least)
        self.patience = patience

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """End the run after ``patience`` evaluations without a better value."""
        if not self.better(record) and self.since >= self.patience and record.round < rounds:
            self.running.stop(f"{self.name} did not improve since round {self.round}, where it was {self.best:.4g}")


class KeepBest(Best):
    """Keep the model of the best evaluation in a safetensors file. It is always complete or absent.

    The file has the tensors of ``Running.arrays``. If clients keep tensors and are
    in this process, client 3's network, for example, is beside it in
    ``NAME-client-3.safetensors``.

    >>> from fl_bn import KeepBest
    >>> keep = KeepBest("best.safetensors")  # Federation(..., callbacks=[keep])

    Args:
        path: The file.
        metric: The metric. Default: the task's own.
        higher_is_better: Default: as the task declares, or by the metric's name,
            see ``Best``.
    """

    def __init__(self, path: str | Path, metric: str = "", higher_is_better: bool | None = None) -> None:
        super().__init__(metric, higher_is_better)
        self.path = Path(path)

    def on_start(self, running: Running) -> None:
        """Begin as ``Best`` does, but ignore earlier rounds if the file is missing."""
        super().on_start(running if self.path.exists() else replace(running, history=()))
        self.running = running

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Write the model of the best evaluation to the file, in place of an earlier one."""
        if not self.better(record):
            return
        about = {"round": str(record.round), self.name: repr(self.best)}
        durable.save_network(self.path, self.running.arrays(), about)
        for client, arrays in self.running.clients().items():
            own = self.path.with_name(f"{self.path.stem}-client-{client}{self.path.suffix}")
            durable.save_network(own, arrays, {**about, "client": str(client)})

    def on_end(self, error: BaseException | None) -> None:
        """Log the best value, its round, and the file."""
        super().on_end(error)
        if self.round:
            LOGGER.info("best %s: %.4g in round %s, kept in %s", self.name, self.best, self.round, self.path)
