"""The class that holds a paper's settings of one table or figure, for tests of the experiments' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tests.sweeps.inner import RunConfig

DEFAULTS = RunConfig(setup="experiments.papers:Papers").to_mapping()
At = Mapping[str, Any]
Keys = dict[str, Any]


def parameter(*numbers: float) -> dict[str, Keys]:
    """Return an axis of the partition's parameter."""
    return {f"{number}": {"partition-parameter": number} for number in numbers}


@dataclass(frozen=True)
class Setting:
    """Hold the paper's settings of one table or figure.

    Attributes:
        where: Where the paper's text gives them; "l." is a line number.
        keys: The run-config keys of all runs. Keys that are not here have their default.
        by: Axis -> value -> run-config keys, which replace those in ``keys``.
        without: Returns whether the paper leaves out the run with these values on the axes.
        also: Returns the keys that depend on the values of several axes.
        seeds: How many seeds each combination has.
    """

    where: str
    keys: Keys
    by: Mapping[str, Mapping[str, Keys]]
    without: Callable[[At], bool] = field(default=lambda at: False)
    also: Callable[[At], Keys] = field(default=lambda at: {})
    seeds: int = 3

    def combinations(self) -> Iterator[tuple[str, ...]]:
        for labels in product(*self.by.values()):
            if not self.without(dict(zip(self.by, labels, strict=True))):
                yield labels

    def expected(self, at: At) -> Keys:
        """Return the paper's keys of the run that stands at ``at``."""
        keys = dict(self.keys)
        for axis, values in self.by.items():
            keys |= values[str(at[axis])]
        return keys | self.also(at)
