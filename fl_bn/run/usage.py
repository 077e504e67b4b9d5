"""Configs of runs from keys that were not all given for that one run: of a run's folder, of a sweep, of a comparison.

Each run leaves out what it would ignore. A key that somebody typed must have an effect in one of the runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fl_bn.run.config import RunConfig
from fl_bn.run.used import HasNoEffect


class Usage:
    """Makes configs, and sees which keys have an effect in one of them."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._refusals: dict[str, str] = {}

    def config(self, values: Mapping[str, Any], must: Collection[str] = ()) -> RunConfig:
        """Return the config of one run, without the keys that it would ignore.

        Args:
            values: Kebab-case keys, as for ``RunConfig.from_mapping``.
            must: Those of them that were given for this one run, which must use them.

        Raises:
            ConfigError: A key is unknown, a value is out of range, or the run would ignore a key of ``must``.
        """
        left = dict(values)
        while True:
            try:
                config = RunConfig.from_mapping(left)
            except HasNoEffect as error:
                if refused := {key: said for key, said in error.by_key.items() if key in must}:
                    raise HasNoEffect(refused) from error
                self._refusals = {**error.by_key, **self._refusals}
                left = {key: value for key, value in left.items() if key not in error.by_key}
            else:
                self._used |= left.keys()
                return config

    @property
    def ignored(self) -> dict[str, str]:
        """The keys that no run made here uses, each with the sentence that refuses it."""
        return {key: said for key, said in self._refusals.items() if key not in self._used}

    def check(self, keys: Collection[str]) -> None:
        """Refuse the first of ``keys`` that no run made here uses.

        Args:
            keys: What was given for these runs, and not for others, too.

        Raises:
            HasNoEffect: There is such a key.
        """
        if refused := {key: said for key, said in self.ignored.items() if key in keys}:
            raise HasNoEffect(refused)
