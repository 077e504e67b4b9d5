"""Write configs in the form of Flower's command lines, without torch, to start quickly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fl_bn.support.names import visible

Scalar = str | int | float | bool
PROGRESS = "progress.jsonl"  # the file in a run's folder to which a user's own app writes the progress of its rounds
OUR_APP = "fl-bn/fl-bn"  # the id of fl-bn's own app
OF_OUR_APP = ("clients", "checkpoint-every")  # keys that `fl-bn submit` fills in for fl-bn's own app, whatever its id
SERVER = "FL_BN_SERVER"  # environment variable of a deployed ServerApp: the server's folder
NODES = "FL_BN_NODES"  # environment variable of a deployed ServerApp: the file that says which node each site has now


def flower_config(values: Mapping[str, Scalar]) -> str:
    """Return ``values`` for Flower's options --node-config and --run-config: ``rounds=3 method="fbn"``.

    A value with an unprintable character, or with a single quote and a double quote
    or backslash, raises ``ValueError``.
    """
    return " ".join(f"{name}={_scalar(name, value)}" for name, value in values.items())


def _scalar(name: str, value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    single = '"' in value or "\\" in value
    if not visible(value) or (single and "'" in value):
        raise ValueError(f"{name}: Flower cannot read {value!r} in a config: remove unprintable characters, and quotes of one kind")
    return f"'{value}'" if single else f'"{value}"'


def registered_nodes() -> dict[int, str]:
    """Return the nodes that are registered at the SuperLink at present: node id -> site.

    They are read from the file that the environment variable ``FL_BN_NODES`` names,
    if any, which ``fl-bn register`` writes, also during a run.
    """
    file = os.environ.get(NODES, "")
    try:
        nodes = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    except FileNotFoundError:
        return {}
    return {int(node): str(site) for site, node in nodes.items()}
