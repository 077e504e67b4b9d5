"""Run tasks, such as clients' rounds, in processes of this machine, with joblib's pool."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging.handlers import QueueHandler
from typing import Any, NamedTuple

from joblib import Parallel, delayed
from joblib.externals.loky import process_executor
from joblib.externals.loky.backend.reduction import dumps

from fl_bn.support.imports import without_gc

MOST_WORKERS = 1024  # processes of one machine
MOST_THREADS = 1024  # threads of one process; with 100,000, torch ends with a segmentation fault
LOGGER = logging.getLogger("flwr")
START = 8.0
"""Seconds that new processes take to import torch and fl-bn, on two idle cores."""
WATCHED = 2
"""Rounds timed before the decision. The first also loads data and builds networks."""
DIED = "its worker process died (killed, or out of memory)"


class Done(NamedTuple):
    """Hold a task's returned ``value``, or the ``error`` it raised."""

    value: Any = None
    error: BaseException | None = None


class Workers:
    """Run tasks in ``count`` processes.

    joblib keeps them for a while. Large arrays in arguments go to shared memory
    once, and are read-only.

    Raises:
        ValueError: ``count`` is above ``MOST_WORKERS``.
    """

    def __init__(self, count: int) -> None:
        if count > MOST_WORKERS:
            raise ValueError(f"workers must be 0..{MOST_WORKERS} (0: one per core), but got {count}")
        self.count = count
        self._pool: Parallel | None = None
        self._loading: Iterator[Any] = iter(())
        self._open = ExitStack()

    def load(self, module: str) -> None:
        """Start the processes, let each import ``module``, and return before they are ready."""
        self._loading = self._started()(delayed(_logged)(_load, (module,), sys.path) for _ in range(self.count))

    def run(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Generator[Done]:
        """Yield the result of ``function(*task)`` for every task, in order.

        Tasks' log records are logged here. Take all results, or call ``close``. If
        a process dies, the tasks without a result run again, one at a time. If
        theirs dies again, the error is ``WorkerDied``.
        """
        finished = 0
        with closing(self._attempt(function, tasks)) as first:
            for done in first:
                finished += 1
                yield done
        for task in tasks[finished:]:
            yield next(self._attempt(function, [task]), Done(error=WorkerDied(DIED)))

    def close(self) -> None:
        """Stop using the processes, which joblib keeps or ends."""
        self._loading = iter(())
        self._open.close()
        self._pool = None

    def _attempt(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Generator[Done]:
        """Yield the results of the tasks, up to the first process that dies."""
        try:
            deque(self._loading, 0)  # if the import failed, the tasks raise the same error
            with _ended(self._started()(delayed(_logged)(function, task, sys.path) for task in tasks)) as made:
                for done, records in made:
                    for record in records:
                        LOGGER.handle(record)
                    yield done
        except BrokenExecutor:
            self.close()

    def _started(self) -> Parallel:
        if self._pool is None:
            self._pool = self._open.enter_context(
                Parallel(self.count, backend="loky", return_as="generator", batch_size=1, pre_dispatch="all")
            )
        return self._pool


@contextmanager
def _ended(results: Generator[Any]) -> Iterator[Generator[Any]]:
    """Cancel the tasks that remain at the end of the block, without joblib's warning."""
    try:
        yield results
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.close()


class WorkerDied(RuntimeError):
    """Report that a worker process ended before it finished its task."""


def cores() -> int:
    """Return the number of cores for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


process_executor._MAX_MEMORY_LEAK_SIZE = sys.maxsize
"""Keep joblib from replacing workers whose memory grew by 300 MB, here by data and networks."""


def _load(module: str) -> None:
    with without_gc():
        importlib.import_module(module)


@cache
def end_with(parent: int) -> None:
    """Leave Ctrl-C to the process ``parent``, and end with it, even a killed one.

    joblib's workers would stay for minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _logged(function: Callable[..., Any], task: tuple[Any, ...], path: list[str]) -> tuple[Done, list[logging.LogRecord]]:
    """Run a task in a worker, without Ctrl-C. Return result and log records."""
    end_with(os.getppid())
    sys.path[:] = path
    with _collected() as records:
        try:
            return Done(function(*task)), records
        except Exception as error:
            return Done(error=_travelling(error)), records


def _travelling(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError for it, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


@contextmanager
def _collected() -> Iterator[list[logging.LogRecord]]:
    handlers, propagates, records = LOGGER.handlers, LOGGER.propagate, list[logging.LogRecord]()
    keep: Any = QueueHandler(records)  # type: ignore[arg-type]  # it makes records that can be pickled
    keep.enqueue = records.append
    LOGGER.handlers, LOGGER.propagate = [keep], False
    try:
        yield records
    finally:
        LOGGER.handlers, LOGGER.propagate = handlers, propagates


@dataclass
class WorkerTiming:
    """Decide in ``rounds`` rounds whether ``workers`` processes save more time than they cost.

    ``seconds`` is round -> seconds of training so far.
    """

    workers: int
    rounds: int
    seconds: dict[int, float] = field(default_factory=dict)

    def note(self, round: int, seconds: float) -> None:
        """Add ``seconds`` to the training time of ``round``."""
        self.seconds[round] = self.seconds.get(round, 0.0) + seconds

    def worth_it(self, round: int) -> bool:
        """Tell whether workers from ``round`` on would save more than ``START`` seconds.

        The last of ``WATCHED`` or more timed rounds is the measure.
        """
        before = [seconds for number, seconds in sorted(self.seconds.items()) if number < round]
        if self.workers < 2 or len(before) < WATCHED:
            return False
        return (self.rounds - round + 1) * before[-1] * (1 - 1 / self.workers) > START
