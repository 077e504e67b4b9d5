"""Clients that are called one by one, but whose rounds are one program: each waits where its round would be, until the last has come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from fl_bn.exchange.local import Turns
from fl_bn.federation.client import LocalRound
from fl_bn.federation.local import Samples
from fl_bn.federation.training import client_round
from fl_bn.federation.values import ClientState, Reply
from fl_bn.federation.vectorised import CannotVectorise, Fallback, vectorised_round
from fl_bn.task import CLASSIFICATION, Task

T = TypeVar("T")


class _Job(NamedTuple):
    """Arguments of ``client_round``."""

    round: LocalRound
    samples: Samples
    seed: int
    client: int
    task: Task
    tells_drift: bool

    @property
    def common(self) -> tuple[int, Task, bool]:
        return self.seed, self.task, self.tells_drift


class VmapRendezvous:
    """Tasks of which each may come to one ``cohort_round``. They take turns, so that nothing of them need be safe in two threads."""

    _here = threading.local()

    def __init__(self, tasks: int, fallback: Fallback) -> None:
        self._turns, self._fallback = Turns(tasks), fallback
        self._awaited = set(range(tasks))
        self._jobs: dict[int, _Job] = {}
        self._results: dict[int, tuple[Reply, ClientState] | Exception | None] = {}

    @classmethod
    def run(cls, tasks: Sequence[Callable[[], T]], fallback: Fallback) -> list[T]:
        """The results of ``tasks``, in order. ``fallback`` is told why rounds cannot be one program."""
        cohort = cls(len(tasks), fallback)
        return cohort._turns.run([partial(cohort._task, task) for task in tasks])

    @classmethod
    def current(cls) -> VmapRendezvous | None:
        """The cohort of the task that the calling thread runs; None outside one."""
        return getattr(cls._here, "cohort", None)

    def round(self, job: _Job) -> tuple[Reply, ClientState]:
        index = Turns.current()[1]
        self._jobs[index] = job
        if not self._last(index):
            self._turns.wait(index)
        result = self._results.pop(index)
        if isinstance(result, Exception):
            raise result
        return client_round(*job) if result is None else result

    def _task(self, task: Callable[[], T]) -> T:
        VmapRendezvous._here.cohort = self
        try:
            return task()
        finally:
            self._last(Turns.current()[1])

    def _last(self, index: int) -> bool:
        """Whether nobody is awaited any more, as task ``index`` has come or ended just now; then the rounds of those who came are there."""
        if index not in self._awaited:
            return False
        self._awaited.discard(index)
        if self._awaited:
            return False
        self._compute()
        for waiting in self._jobs.keys() - {index}:
            self._turns.ready(waiting)
        return True

    def _compute(self) -> None:
        jobs = list(self._jobs.values())
        found: Sequence[tuple[Reply, ClientState] | Exception | None]
        try:
            if any(job.common != jobs[0].common for job in jobs):
                raise CannotVectorise("all clients of a cohort need the same seed and task, but theirs differ")
            rounds, samples, clients = [job.round for job in jobs], [job.samples for job in jobs], [job.client for job in jobs]
            found = vectorised_round(rounds, samples, jobs[0].seed, clients, jobs[0].task, jobs[0].tells_drift) if jobs else []
        except CannotVectorise as reason:
            self._fallback.say(reason)
            found = [None] * len(jobs)
        except Exception as error:  # each of those who wait is told
            found = [error] * len(jobs)
        self._results = dict(zip(self._jobs, found, strict=True))


def cohort_round(
    round: LocalRound, samples: Samples, seed: int, client: int, task: Task = CLASSIFICATION, tells_drift: bool = False
) -> tuple[Reply, ClientState]:
    """``client_round``, as one program with the rest of the cohort where there is one. Raises ClientTooSmall as that does."""
    job, cohort = _Job(round, samples, seed, client, task, tells_drift), VmapRendezvous.current()
    if cohort is None or (round.trains and len(samples) < round.settings.fewest(2)):
        return client_round(*job)
    return cohort.round(job)
