"""Record the learning rate that each round's train config has in an app of your own. A hook may change it in any round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fl_bn.federation.rounds import constant_rate
from fl_bn.flower.population import RunFailed

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's own examples."""


def named_rate(config: Mapping[str, Any]) -> float | None:
    """Return the first number in ``config`` under one of the names ``RATES``, also one that is written as text; None if there is none.

    Raises:
        RunFailed: The number is negative or not finite.
    """
    for name in RATES:
        if (value := as_number(config.get(name))) is None:
            continue
        if not 0 <= value < math.inf:
            raise RunFailed(f"{name} in the train config must be a finite number >= 0 (the learning rate), but is {value}")
        return value
    return None


def as_number(value: Any) -> float | None:
    """Return a number, or the number that a text such as ``"0.1"`` is; None for anything else."""
    if is_number(value):
        return float(value)
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else None
    return None


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an int or a float, such as a ``numpy.float64``, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class NamedRates:
    """Map rounds to learning rates. A round whose config has no rate uses the rate of the last round before it that has one."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> None:
        """Store the learning rate in the train config of ``round``, if it has one.

        Raises:
            RunFailed: The rate is negative or not finite.
        """
        if (rate := named_rate(config)) is not None:
            self._rates[round] = rate

    def __call__(self, round: int, rounds: int) -> float:
        """Return the learning rate of ``round``: the last one that was stored for this or an earlier round.

        If there is none, return the rate of the first later round that has one. If no rate was stored, return that of
        ``constant_rate``.
        """
        if not self._rates:
            return constant_rate(round, rounds)
        before = [number for number in self._rates if number <= round]
        return self._rates[max(before) if before else min(self._rates)]
