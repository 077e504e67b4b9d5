"""The class that holds a paper's settings of one table or figure, for tests of the experiments' files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.sweeps.inner import RunConfig

DEFAULTS = RunConfig(setup="experiments.papers:Papers").to_mapping()
At = Mapping[str, Any]
Keys = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Hold the paper's settings of one table or figure.

    Attributes:
        where: Where the paper's text gives them.
        keys: The run-config keys of all runs.
        by: Axis -> value -> run-config keys, which replace those in ``keys``.
        without: Returns whether the paper leaves out the run with these values on the axes.
    """

    where: str
    keys: Keys
    by: Mapping[str, Mapping[str, Keys]]
    without: Callable[[At], bool] = field(default=lambda at: False)
