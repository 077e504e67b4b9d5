"""Clients that are called one by one, but whose rounds are one program: each waits where its round would be, until all are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from fl_bn.exchange.local import Turns
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Member, Result, client_round, client_rounds
from fl_bn.federation.engines.vectorised import AsOneProgram, CannotVectorise, Fallback
from fl_bn.federation.sources import SampleSource

T = TypeVar("T")


class VmapRendezvous:
    """Tasks of which each may come to one ``cohort_round``. They take turns, so that nothing of them need be safe in two threads."""

    _here = threading.local()

    def __init__(self, tasks: int, fallback: Fallback) -> None:
        self._turns, self._fallback = Turns(tasks), fallback
        self._awaited = set(range(tasks))
        self._members: dict[int, Member] = {}
        self._results: dict[int, Result | Exception | None] = {}

    @classmethod
    def run(cls, tasks: Sequence[Callable[[], T]], fallback: Fallback) -> list[T]:
        """The results of ``tasks``, in order. ``fallback`` is told why rounds cannot be one program."""
        cohort = cls(len(tasks), fallback)
        return cohort._turns.run([partial(cohort._task, task) for task in tasks])

    @classmethod
    def current(cls) -> VmapRendezvous | None:
        """The cohort of the task that the calling thread runs; None outside one."""
        return getattr(cls._here, "cohort", None)

    def round(self, round: LocalRound, source: SampleSource) -> Result:
        """Carry out ``round`` together with those of the other tasks that come to one."""
        index = Turns.current()[1]
        self._members[index] = Member(round, source)
        if not self._last(index):
            self._turns.wait(index)
        result = self._results.pop(index)
        if isinstance(result, Exception):
            raise result
        return client_round(round, source) if result is None else result

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
        for waiting in self._members.keys() - {index}:
            self._turns.ready(waiting)
        return True

    def _compute(self) -> None:
        members = list(self._members.values())
        results: Sequence[Result | Exception | None]
        try:
            sources = [cast(SampleSource, member.source) for member in members]
            if any((one.seed, one.task, one.tells_drift) != (sources[0].seed, sources[0].task, sources[0].tells_drift) for one in sources):
                raise CannotVectorise("all clients of a cohort need the same seed and task, but theirs differ")
            results = client_rounds(members, AsOneProgram())
        except CannotVectorise as reason:
            self._fallback.say(reason)
            results = [None] * len(members)
        except Exception as error:  # each of those who wait is told
            results = [error] * len(members)
        self._results = dict(zip(self._members, results, strict=True))


def cohort_round(round: LocalRound, source: SampleSource) -> Result:
    """Carry out ``round`` as one program with the rest of the cohort, where there is one. Raises ClientTooSmall."""
    cohort = VmapRendezvous.current()
    if cohort is None or (round.trains and len(source.samples) < round.settings.fewest(2)):
        return client_round(round, source)
    return cohort.round(round, source)
