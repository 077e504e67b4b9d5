"""Follow the learning rate that the train config of an app of your own names, even if a hook changes it in some round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_bn.federation.rounds import constant_rate

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's own examples."""


def named_rate(config: Mapping[str, Any]) -> float | None:
    """Return the learning rate that ``config`` names; None if it names none."""
    values = [config[name] for name in RATES if name in config]
    return next((float(value) for value in values if type(value) in (int, float) and value > 0), None)


class NamedRates:
    """Serve as the schedule of the learning rates that were named so far. A rate holds until the next one is named."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> None:
        """Note the rate that ``config`` names in ``round``, if it names one."""
        if (rate := named_rate(config)) is not None:
            self._rates[round] = rate

    def __call__(self, round: int, rounds: int) -> float:
        """Return the rate of ``round``: the latest rate named for this or an earlier round.

        If there is none, return the first rate named for a later round; without any rate, ``constant_rate``.
        """
        if not self._rates:
            return constant_rate(round, rounds)
        before = [number for number in self._rates if number <= round]
        return self._rates[max(before) if before else min(self._rates)]
