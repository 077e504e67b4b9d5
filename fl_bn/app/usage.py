"""Make the run configs of several runs from common keys, as for a sweep.

Each run leaves out the keys without effect in it, but a key of the user's must have
an effect in one of the runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_bn.app.config import RunConfig
from fl_bn.app.used import HasNoEffect


class Usage:
    """Make run configs, and record which keys have an effect in at least one of them."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._refusals: dict[str, str] = {}

    def config(self, values: Mapping[str, Any]) -> RunConfig:
        """Return the run config of one run from values by kebab-case key, without those of no effect.

        An unknown key, or a value out of range, raises ``ConfigError``.
        """
        remaining = dict(values)
        while True:
            try:
                config = RunConfig.from_mapping(remaining)
            except HasNoEffect as error:
                self._refusals = {**error.by_key, **self._refusals}
                remaining = {key: value for key, value in remaining.items() if key not in error.by_key}
            else:
                self._used |= remaining.keys()
                return config

    def check(self, keys: Collection[str]) -> None:
        """Raise ``HasNoEffect`` unless each of ``keys`` has an effect in a run made so far."""
        if refused := {key: why for key, why in self._refusals.items() if key in keys and key not in self._used}:
            raise HasNoEffect(refused)
