"""Decide during a run whether worker processes would save more time than they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

START = 8.0
"""Seconds that new processes take to import torch and fl-bn. Measured: 4 on two idle cores (``benchmarks/startup.py``)."""
WATCHED = 2
"""The number of rounds that are timed before the decision. The first round also loads data and builds networks."""


@dataclass
class Pace:
    """Hold the time that training took in each round so far.

    Attributes:
        workers: The number of processes that would compute clients.
        rounds: The number of rounds of the run.
        seconds: Round -> seconds of training.
    """

    workers: int
    rounds: int
    seconds: dict[int, float] = field(default_factory=dict)

    def note(self, round: int, seconds: float) -> None:
        """Add ``seconds`` to the training time of ``round``."""
        self.seconds[round] = self.seconds.get(round, 0.0) + seconds

    def worth_it(self, round: int) -> bool:
        """Tell whether worker processes save more time than they cost, if they compute the rounds from ``round`` on.

        They cost the time to start, to load the data, and to build the network. The last two are estimated from the
        first round: the time by which it was slower than later rounds. False until ``WATCHED`` rounds were timed, and
        with fewer than two workers.
        """
        before = [seconds for number, seconds in sorted(self.seconds.items()) if number < round]
        if self.workers < 2 or len(before) < WATCHED:
            return False
        first, later = before[0], median(before[1:])
        saved = (self.rounds - round + 1) * later * (1 - 1 / self.workers)
        return saved > START + max(0.0, first - later)
