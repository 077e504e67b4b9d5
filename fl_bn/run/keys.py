"""Check the values of some run-config keys, and print all keys as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import tomli_w

from fl_bn.options import Key
from fl_bn.support.names import names_of

LONGEST = 255  # the longest name of a file, in bytes


def known_device(name: str) -> bool:
    """Return whether ``name`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    return name in ("auto", "cpu") or re.fullmatch(r"cuda(:\d+)?", name) is not None


def all_of(known: Collection[str]) -> Callable[[str], bool]:
    """Return a function that checks whether a text is a list of names in ``known``, separated by commas."""
    return lambda text: all(name in known for name in names_of(text))


SECTIONS = {
    "method": "Method",
    "model": "Network and task",
    "dataset": "Data",
    "partition": "Who has which data",
    "share-label-counts": "What clients tell of themselves",
    "calibrate": "Calibration of the statistics",
    "clients": "Clients and rounds",
    "min-replies": "Clients that are late or missing",
    "checkpoint-every": "Checkpoints",
    "exchange": "Layer-wise exchange",
    "byzantine": "Byzantine clients and robust rules",
    "secure-aggregation": "Secure aggregation and noise",
    "local-epochs": "Local training",
    "objective": "Local objective",
    "server-optimizer": "Server optimizer",
    "evaluate-every": "Evaluation",
    "seed": "Seed and machine",
    "output": "Output",
}
"""The headings of docs/config.md, by the first key below each. Options follow the key that chooses their owner."""


def table(keys: Mapping[str, Key]) -> str:
    """Return all keys as Markdown, with one table per section, as they stand in docs/config.md."""
    lines: list[str] = []
    for key in keys.values():
        if key.name in SECTIONS or not lines:
            heading = [f"## {SECTIONS[key.name]}", ""] if key.name in SECTIONS else []
            lines += [*([""] if lines else []), *heading, "| key | default | values | meaning |", "|---|---|---|---|"]
        default = str(key.default).lower() if isinstance(key.default, bool) else key.default
        lines.append(f"| `{key.name}` | {f'`{default}`' if default != '' else 'empty'} | {key.shown} | {key.help} |")
    return "\n".join(lines)


def defaults(keys: Mapping[str, Key]) -> str:
    """Return the defaults of all keys as TOML, as they stand in ``[tool.flwr.app.config]`` of pyproject.toml."""
    return tomli_w.dumps({key.name: key.default for key in keys.values()}).rstrip("\n")
