"""Read the keys of a run config from ``key=value`` pairs, or from a TOML file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from fl_bn.app.errors import ConfigError
from fl_bn.support.names import LONG

UNREADABLE = (
    ValueError,
    RecursionError,
)  # of tomllib: wrong syntax, too long numbers, too deeply nested lists, bytes that are not text
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


def parse_overrides(text: str) -> dict[str, Any]:
    """Read run-config keys from a text such as ``rounds=10 method='hbn'``, or from a .toml file.

    The syntax is that of ``flwr run --run-config``, but a part that cannot be read
    raises ``ConfigError``.
    """
    if text.endswith(".toml"):
        try:
            return tomllib.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, *UNREADABLE) as error:
            raise ConfigError(f"{text} cannot be read as a run config: {error}") from error
    if rest := PAIR.sub("", text).strip():
        raise ConfigError(f"cannot read {rest!r} in the run config: expected key=value pairs, e.g. rounds=10 method='hbn'")
    values: dict[str, Any] = {}
    for name, value in PAIR.findall(text):
        if name in values:
            raise ConfigError(f"the run config has {name} twice: leave one of them out")
        try:
            values[name] = tomllib.loads(f"value = {value}")["value"]
        except UNREADABLE as error:
            shown = value if len(value) <= LONG else f"{value[:LONG]}..."
            raise ConfigError(f"cannot read {name}={shown}: expected a number, true, false or a quoted string: {name}='{shown}'") from error
    return values
