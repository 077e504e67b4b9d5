"""Follow the learning rate that the train config of an app of your own names, even if a hook changes it in some round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_bn.federation.rounds import constant_rate

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's own examples."""


def named_rate(config: Mapping[str, Any]) -> float | None:
    """Return the first positive number in ``config`` under one of the names ``RATES``; None if there is none."""
    values = [config[name] for name in RATES if name in config]
    return next((float(value) for value in values if type(value) in (int, float) and value > 0), None)


class NamedRates:
    """Map rounds to learning rates. A rate that the config of some round names holds until a later round names another."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> None:
        """Store the rate that the train config of ``round`` names, if it names one."""
        if (rate := named_rate(config)) is not None:
            self._rates[round] = rate

    def __call__(self, round: int, rounds: int) -> float:
        """Return the rate of ``round``: the latest rate named for this or an earlier round.

        If there is none, return the first rate named for a later round. If no round has a rate, return that of
        ``constant_rate``.
        """
        if not self._rates:
            return constant_rate(round, rounds)
        before = [number for number in self._rates if number <= round]
        return self._rates[max(before) if before else min(self._rates)]
