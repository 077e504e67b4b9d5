"""Make configs of runs from keys that were given for several runs: for a run's folder, a sweep, a comparison.

Each run leaves out the keys that it would ignore. A key that somebody typed must have an effect in one of the runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_bn.run.config import RunConfig
from fl_bn.run.used import HasNoEffect


class Usage:
    """Make configs, and note which keys have an effect in one of them."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._refusals: dict[str, str] = {}

    def config(self, values: Mapping[str, Any], must: Collection[str] = ()) -> RunConfig:
        """Return the config of one run, without the keys that it would ignore.

        Args:
            values: Kebab-case keys, as for ``RunConfig.from_mapping``.
            must: The keys among them that were given for this one run, which must use them.

        Raises:
            ConfigError: A key is unknown, a value is out of range, or the run would ignore a key of ``must``.
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
        """Return the keys that no run made here uses, each with the sentence that refuses it."""
        return {key: sentence for key, sentence in self._refusals.items() if key not in self._used}

    def check(self, keys: Collection[str]) -> None:
        """Refuse the first of ``keys`` that no run made here uses.

        Args:
            keys: The keys that were given for these runs, and for no others.

        Raises:
            HasNoEffect: There is such a key.
        """
        if refused := {key: sentence for key, sentence in self.ignored.items() if key in keys}:
            raise HasNoEffect(refused)
