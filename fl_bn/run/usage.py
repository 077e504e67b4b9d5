"""Make the run configs of several runs from common keys, as for a sweep.

Each run leaves out the keys that have no effect in it. But a key that the user gave must have an effect in at least one
of the runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_bn.run.config import RunConfig
from fl_bn.run.used import HasNoEffect


class Usage:
    """Make run configs, and record which keys have an effect in at least one of them."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._refusals: dict[str, str] = {}

    def config(self, values: Mapping[str, Any]) -> RunConfig:
        """Return the run config of one run, without the keys that have no effect in it.

        Args:
            values: Values by kebab-case key, as for ``RunConfig.from_mapping``.

        Raises:
            ConfigError: A key is unknown, or a value is out of range.
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
        """Check that each of ``keys`` has an effect in at least one run made so far.

        Args:
            keys: The keys that the user gave for these runs.

        Raises:
            HasNoEffect: A key has no effect in any of these runs.
        """
        if refused := {key: why for key, why in self._refusals.items() if key in keys and key not in self._used}:
            raise HasNoEffect(refused)
