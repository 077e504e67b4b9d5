"""Compute the rounds of several clients together, although each client's code asks only for its own round.

Each request waits until all clients have made theirs. One vectorised program then computes all rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from fl_bn.exchange.local import Turns
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import client_rounds
from fl_bn.federation.engines.engine import Member, Result
from fl_bn.federation.engines.vectorised import AsOneProgram, CannotVectorise, Fallback
from fl_bn.federation.sources import SampleSource

T = TypeVar("T")


class VmapRendezvous:
    """Run several tasks, each of which may call ``round`` once, and compute these rounds together.

    Every task has a thread, but only one thread runs at a time, so the tasks' code need not be thread-safe.

    Args:
        tasks: The number of tasks.
        fallback: Reports the reason if the rounds cannot be computed in one vectorised program.
    """

    _here = threading.local()

    def __init__(self, tasks: int, fallback: Fallback) -> None:
        self._turns, self._fallback = Turns(tasks), fallback
        self._awaited = set(range(tasks))
        self._members: dict[int, Member] = {}
        self._results: dict[int, Result | Exception | None] = {}

    @classmethod
    def run(cls, tasks: Sequence[Callable[[], T]], fallback: Fallback) -> list[T]:
        """Run ``tasks``, and return their results in order.

        Args:
            tasks: Functions without arguments.
            fallback: Reports the reason if the rounds cannot be computed in one vectorised program.
        """
        cohort = cls(len(tasks), fallback)
        return cohort._turns.run([partial(cohort._task, task) for task in tasks])

    @classmethod
    def for_round(cls, round: LocalRound, source: SampleSource) -> VmapRendezvous | None:
        """Return the rendezvous of the calling thread, for the round of one client.

        Returns:
            The rendezvous of the task in this thread. None if the thread runs no task, or if the client has too few
                samples to train.
        """
        small = round.trains and len(source.samples) < round.settings.fewest(2)
        return None if small else getattr(cls._here, "cohort", None)

    def round(self, round: LocalRound, source: SampleSource) -> Result:
        """Compute one client's round together with the rounds of the other tasks of ``run``.

        The calling task waits until every other task has called this method too, or has ended.

        Args:
            round: The client's round.
            source: The batches of the client.

        Returns:
            The result of this client's round.

        Raises:
            ClientTooSmall: The client has too few samples.
        """
        index = Turns.current()[1]
        self._members[index] = Member(round, source)
        if not self._last(index):
            self._turns.wait(index)
        result = self._results.pop(index)
        if isinstance(result, Exception):
            raise result
        return client_rounds([Member(round, source)])[0] if result is None else result

    def _task(self, task: Callable[[], T]) -> T:
        VmapRendezvous._here.cohort = self
        try:
            return task()
        finally:
            self._last(Turns.current()[1])

    def _last(self, index: int) -> bool:
        """Record that task ``index`` has called ``round`` or ended. If it is the last task, compute all rounds, and return True."""
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
                raise CannotVectorise(
                    "all clients of a cohort need the same seed and task, and all or none must report the drift of statistics"
                )
            results = client_rounds(members, AsOneProgram())
        except CannotVectorise as reason:
            self._fallback.say(reason)
            results = [None] * len(members)
        except Exception as error:  # every waiting task raises this error
            results = [error] * len(members)
        self._results = dict(zip(self._members, results, strict=True))
