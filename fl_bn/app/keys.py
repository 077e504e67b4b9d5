"""Check the values of some run-config keys, and print all keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tomli_w

from fl_bn.options import Option

LONGEST = 255  # the longest name of a file, in bytes


def known_device(name: str) -> bool:
    """Return whether ``name`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    return name in ("auto", "cpu") or re.fullmatch(r"cuda(:\d+)?", name) is not None


SECTIONS = {
    "method": "Method",
    "model": "Network and task",
    "dataset": "Data",
    "partition": "Who has which data",
    "unseen-client": "What clients tell of themselves",
    "calibrate": "Calibration of the statistics",
    "clients": "Clients and rounds",
    "min-replies": "Clients that are late or missing",
    "checkpoint-every": "Checkpoints",
    "exchange": "Layer-wise exchange",
    "declared-byzantine": "Byzantine clients and robust rules",
    "secure-aggregation": "Secure aggregation and noise",
    "local-epochs": "Local training",
    "objective": "Local objective",
    "server-optimizer": "Server optimizer",
    "evaluate-every": "Evaluation",
    "seed": "Seed and machine",
    "output": "Output",
}
"""The headings of docs/config.md, by the first key below each. Options follow their owner's key."""


OFTEN = (
    "method", "model", "dataset", "data-path", "partition", "partition-parameter", "clients", "rounds", "local-steps", "local-epochs",
    "batch-size", "learning-rate", "seed", "device", "workers", "output", "name",
)  # fmt: skip
"""The keys that `fl-bn run --help` names, and that come first in docs/config.md."""


def often_used(keys: Mapping[str, Option]) -> list[tuple[str, str, str]]:
    """Return name, default and meaning, without special values, of the keys often used."""
    return [(name, _default(keys[name]) or "empty", keys[name].help.partition("; ")[0]) for name in OFTEN]


def _default(key: Option) -> str:
    return str(key.default).lower() if isinstance(key.default, bool) else str(key.default)


def described(keys: Mapping[str, Option]) -> str:
    """Return all keys as Markdown: a line with those often used, and one list per section."""
    lines = [f"Often used: {', '.join(f'`{name}`' for name in OFTEN)}."]
    for key in keys.values():
        if key.name in SECTIONS:
            lines += ["", f"## {SECTIONS[key.name]}", ""]
        if isinstance(key.default, bool):
            lines.append(f"- `{key.name}={_default(key)}`: {key.help}")
        else:
            lines.append(f"- `{key.name}={key.default!r}` ({key.shown}): {key.help}")
    return "\n".join(lines)


def defaults(keys: Mapping[str, Option]) -> str:
    """Return all defaults as TOML, as in ``[tool.flwr.app.config]`` of pyproject.toml."""
    return tomli_w.dumps({key.name: key.default for key in keys.values()}).rstrip("\n")
