"""``fl-bn submit``: a run on the deployed sites, its log, and an exit code that says how it ended."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fl_bn.pairs import Scalar, flower_config
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.overrides import parse_overrides
from fl_bn.site.control import Control, ControlError, control_of
from fl_bn.site.folders import FolderError, ServerFolder

SENT = {".py", ".toml", ".md"}  # by Flower, to the sites; all else stays
APART = ("pyvenv.cfg", "server/server.toml", "server.toml", "site.toml")  # a folder with one of these is an environment, or of a kit
SILENCE = 600.0  # seconds without an answer of the SuperLink after which a run counts as lost
COMPLETED = "finished:completed"


def run_config(server: ServerFolder, overrides: str) -> dict[str, Scalar]:
    """The run config's keys that follow from the folder, and those that the user gave, which win. Raises ConfigError."""
    of_folder: dict[str, Scalar] = {
        "clients": len(server.sites),
        "output": str(server.results),
        "exchange-host": server.exchange_host,
        "exchange-port": server.exchange_port,
        "exchange-join-timeout": 120.0,  # at Flower's pace a slow machine starts half a minute after the others
        "exchange-certificate": str(server.certificate),
        "exchange-key": str(server.key),
        "exchange-authority": str(server.authority),
    }
    config = of_folder | parse_overrides(overrides)
    RunConfig.from_mapping(config)
    try:
        flower_config(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config


def submit(server: ServerFolder, overrides: str, address: str = "", say: Callable[[str], None] = print) -> bool:
    """Whether the run completed. Its log goes to ``say``, line by line.

    Raises:
        ConfigError, FolderError, ControlError: it could not be submitted.
    """
    config = run_config(server, overrides)
    with control_of(server, address) as control:
        if not config.get("client-nodes") and config["clients"] == len(server.sites):
            nodes = control.nodes([server.public_key(site) for site in server.sites])
            config["client-nodes"] = ",".join(map(str, nodes))
        with _staged(project_of(server)) as app:
            run = control.start_run(app, flower_config(config))
        say(f"run {run} is submitted to {control.address}")
        try:
            status = _follow(control, run, say)
        except KeyboardInterrupt:
            say(f"run {run} goes on without this log. Submitting another one does not end it; this does:")
            say(f"  {' '.join(control.argv('stop', run, str(project_of(server)), 'deployment'))} {_at(control)}")
            raise
    say(f"run {run}: {status}")
    return status == COMPLETED


def project_of(server: ServerFolder) -> Path:
    """The project that is submitted: server.toml's ``app``, else the one that this package is installed from. Raises FolderError."""
    folder = server.app or Path(__file__).parents[2]
    if not (folder / "pyproject.toml").exists():
        raise FolderError(
            f"{folder} has no pyproject.toml, so there is no project to submit: give its folder as `app` in {server.path / server.file}, "
            "or install it with pip install -e"
        )
    return folder


@contextmanager
def _staged(project: Path) -> Iterator[Path]:
    """A copy of what Flower sends of ``project``: it wants to write beside it, and would look through all of an environment's files."""

    def others(folder: str, names: list[str]) -> list[str]:
        apart = {name for name in names if name.startswith(".") and name != ".gitignore"} | {"__pycache__"}
        apart |= {name for name in names if any(os.path.exists(os.path.join(folder, name, mark)) for mark in APART)}
        files = [name for name in names if os.path.isfile(os.path.join(folder, name)) and name != ".gitignore"]
        return [*apart, *(name for name in files if Path(name).suffix not in SENT)]

    with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
        staged = Path(folder) / "app"
        shutil.copytree(project, staged, ignore=others, ignore_dangling_symlinks=True)
        yield staged


def _follow(control: Control, run: str, say: Callable[[str], None]) -> str:
    """The run's last status; says each line of its log once, through restarts of the SuperLink."""
    said, answered = 0, time.monotonic()
    while True:
        with control.log(run) as lines:
            for place, line in enumerate(lines):
                if place >= said:
                    say(line.rstrip())
                    said = place + 1
        try:
            status = control.status(run)
        except ControlError as error:
            if time.monotonic() - answered > SILENCE:
                raise
            say(f"{error}; trying again")
        else:
            answered = time.monotonic()
            if status.startswith("finished"):
                return status
        time.sleep(1)


def _at(control: Control) -> str:
    values: Mapping[str, Scalar] = {"address": control.address, "root-certificates": str(control.authority)}
    return f'--federation-config "{flower_config(values)}"'
