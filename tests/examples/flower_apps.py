"""Run the Flower apps of ``examples/flower_apps`` in this process, imported as Flower imports them, and keep their results."""

from __future__ import annotations

import importlib
import logging
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower.compat import LOGGER
from tests.in_process import WatchedGrid

APPS = Path(__file__).parents[2] / "examples" / "flower_apps"
METHOD = {"quickstart-pytorch": "fbn", "advanced-pytorch": "fbn", "quickstart-monai": "fixbn", "fedbn": "fedbn", "niid_bench": "hbn"}
"""Converted app -> the method by which it trains then."""
NAMES = tuple(METHOD)
STRATEGY = {"fbn": "FBN", "fixbn": "FixBN", "fedavg": "FedAvgBN"}
CLIENTS = {"quickstart-pytorch": 3, "advanced-pytorch": 3, "quickstart-monai": 2, "fedbn": 5, "niid_bench": 3}
STRATEGIES = ("FedAvg", "CustomFedAvg", *STRATEGY.values())  # the names in server_app.py


@dataclass
class Ran:
    """Hold the results of a run.

    Attributes:
        folder: The folder into which the app wrote.
        grid: The grid, with the messages of the run.
        log: The lines of Flower's log.
        result: What the strategy's ``start`` returned.
    """

    folder: Path
    grid: WatchedGrid
    log: list[str] = field(default_factory=list)
    result: Any = None


def lines_changed(app: Path) -> tuple[int, int]:
    """Return how many lines the conversion adds and takes away, without empty ones."""
    words = ["git", "diff", "--no-index", "-w", "--unified=0", "--no-color", "before", "after"]
    found = subprocess.run(words, cwd=app, capture_output=True, text=True, check=False).stdout.splitlines()
    changed = [line[0] for line in found if line[:1] in ("+", "-") and line[:3] not in ("+++", "---") and line[1:].strip()]
    return changed.count("+"), changed.count("-")


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return found


@contextmanager
def imported(folder: Path) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Import the modules of the ServerApp and of the ClientApp that ``pyproject.toml`` names; forget them after the block."""
    names = [settings(folder)["components"][part].partition(":")[0] for part in ("serverapp", "clientapp")]
    package = names[0].partition(".")[0]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        server, client = (importlib.import_module(name) for name in names)
        assert str(server.__file__).startswith(str(folder))
        yield server, client
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def watch(server: ModuleType, ran: Ran) -> None:
    """Replace the ``start`` of the strategies in the server's module, so that ``ran`` gets its result."""
    for own in STRATEGIES:
        if hasattr(kind := getattr(server, own, None), "start"):

            def start(self: Any, *args: Any, _kind: Any = kind, **kwargs: Any) -> Any:
                ran.result = _kind.start(self, *args, **kwargs)
                return ran.result

            setattr(server, own, type(own, (kind,), {"start": start}))


def run(name: str, app: Path, folder: Path, rounds: int = 2, **config: Any) -> Ran:
    """Run the app in the folder ``app``, with ``config`` as its run config; it writes into ``folder``."""
    values = {**settings(app)["config"], "num-server-rounds": rounds, **config}
    folder.mkdir(parents=True, exist_ok=True)
    with imported(app) as (server, client), chdir(folder):
        assert isinstance(client.app, ClientApp)
        ran = Ran(folder, WatchedGrid(client.app, CLIENTS[name]))
        for context in ran.grid._contexts.values():
            context.run_config = values
        watch(server, ran)
        handler = logging.Handler()
        handler.emit = lambda record: ran.log.append(record.getMessage())  # type: ignore[method-assign]
        LOGGER.addHandler(handler)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                server.app(ran.grid, Context(1, 0, {}, RecordDict(), values))
        finally:
            LOGGER.removeHandler(handler)
    return ran


def with_method(name: str, method: str, folder: Path) -> Path:
    """Copy the converted app ``name`` into ``folder``, and change its method to ``method``; return the folder."""
    own = METHOD[name]
    shutil.copytree(APPS / name / "after", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.py"):
        text = file.read_text().replace(f"{own}()", f"{method}()").replace(f"fl_bn.methods import {own}", f"fl_bn.methods import {method}")
        file.write_text(re.sub(rf"\b{STRATEGY[own]}\b", STRATEGY[method], text) if own in STRATEGY else text)
    assert f"{method}()" in "".join(file.read_text() for file in folder.rglob("*.py"))
    return folder
