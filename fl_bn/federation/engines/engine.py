"""Define the engine, which computes the rounds of a cohort's clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fl_bn.federation.client import LocalRound
from fl_bn.federation.source import Source, Trained
from fl_bn.federation.values import ClientState, Reply


class Member(NamedTuple):
    """Hold the round of one client of a cohort, and its source of batches."""

    round: LocalRound
    source: Source


Result = tuple[Reply, ClientState]


class Engine(Protocol):
    """Compute the rounds of a cohort's clients: one after the other, or all together in vectorised code."""

    def check(self, members: Sequence[Member]) -> None:
        """Raise an error if this engine cannot compute the rounds of the clients ``members``. Otherwise do nothing."""
        ...

    def measure(self, members: Sequence[Member]) -> None:
        """Run the statistics pass of every client in ``members``."""
        ...

    def train(self, members: Sequence[Member], batches: Sequence[Iterable[Any]]) -> list[list[Trained]]:
        """Train each client in ``members`` on its own ``batches``.

        Returns:
            For each client, the result of each pass over its batches.
        """
        ...
