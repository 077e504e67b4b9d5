"""What a paper says of one table or figure, for tests of the experiments' files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_bn.run.config import RunConfig

DEFAULTS = RunConfig().to_mapping()
At = Mapping[str, Any]
Keys = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One table or figure. ``keys``: of all its runs; ``by``: axis -> value -> keys, which count more; ``where``: in the text.

    ``without``: whether the paper leaves out the run at a place.
    """

    where: str
    keys: Keys
    by: Mapping[str, Mapping[str, Keys]]
    without: Callable[[At], bool] = field(default=lambda at: False)
