"""Read the factor of the learning rate that a federation's ``schedule`` gives for each round."""

from __future__ import annotations

import math
from collections.abc import Callable


def same_rate(round: int, rounds: int) -> float:
    """Return 1, the factor of the learning rate in every round."""
    return 1.0


def factor_of(schedule: Callable[[int, int], float], round: int, rounds: int) -> float:
    """Return the factor of the learning rate that ``schedule`` gives for a round.

    Raises:
        ValueError: The factor is no finite number above 0.
    """
    factor = schedule(round, rounds)
    if isinstance(factor, bool) or not isinstance(factor, float | int) or not 0 < factor < math.inf:
        raise ValueError(
            f"schedule must return a finite number above 0 (the factor of the learning rate), but for round {round} returned {factor!r}"
        )
    return float(factor)
