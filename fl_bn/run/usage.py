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

    def config(self, values: Mapping[str, Any], must: Collection[str] = ()) -> RunConfig:
        """Return the run config of one run, without the keys that have no effect in it.

        Args:
            values: Values by kebab-case key, as for ``RunConfig.from_mapping``.
            must: The keys that must have an effect in this run, since the user gave them for this run alone.

        Raises:
            ConfigError: A key is unknown, a value is out of range, or a key of ``must`` has no effect.
        """
        remaining = dict(values)
        while True:
            try:
                config = RunConfig.from_mapping(remaining)
            except HasNoEffect as error:
                if refused := {key: sentence for key, sentence in error.by_key.items() if key in must}:
                    raise HasNoEffect(refused) from error
                self._refusals = {**error.by_key, **self._refusals}
                remaining = {key: value for key, value in remaining.items() if key not in error.by_key}
            else:
                self._used |= remaining.keys()
                return config

    @property
    def ignored(self) -> dict[str, str]:
        """Return key -> the reason why it has no effect, for keys that had no effect in any run config made so far."""
        return {key: sentence for key, sentence in self._refusals.items() if key not in self._used}

    def check(self, keys: Collection[str]) -> None:
        """Check that each of ``keys`` has an effect in at least one run made so far.

        Args:
            keys: The keys that the user gave for these runs.

        Raises:
            HasNoEffect: A key has no effect in any of these runs.
        """
        if refused := {key: sentence for key, sentence in self.ignored.items() if key in keys}:
            raise HasNoEffect(refused)
