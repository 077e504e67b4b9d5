"""List the runs of a server, end one, or copy its folder: ``fl-bn runs``, ``abort`` and ``fetch``."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fl_bn.support.flower_config import Scalar
from fl_bn_site.control import Control, control_of
from fl_bn_site.folders import ServerFolder
from fl_bn_site.queue import Queue
from fl_bn_site.queue_store import STARTED, run_name
from fl_bn_site.registered import Submitted

ACTIVE = ("pending", "starting", "running")


class NoSuchRun(ValueError):
    """No run has this name or id."""


class NotHere(ValueError):
    """The files of a run are on another machine."""


@dataclass(frozen=True)
class RunLine:
    """Describe a run in one line.

    Attributes:
        id: Flower's id; empty while the run waits in the queue.
        name: The name of its folder.
        state: waiting, pending, starting, running, completed, failed, stopped, resumed (it ended early, and a later
            run went on with its folder), refused or dropped (it never began).
        round: The last round that is done; None: not known, since a later run went on with the folder.
        rounds: How many rounds there will be; 0: not known yet.
        start: When it started, or, before that, when it was submitted, in ISO 8601.
        seconds: How long it took, or has taken so far; None: it has not started.
        submitter: Who submitted it, USER@HOST; empty: it is not known.
        code: The SHA-256 of the app that was sent to the sites; empty: none was sent yet.
        why: Why it was refused, or who dropped it.
    """

    id: str
    name: str
    state: str
    round: int | None
    rounds: int
    start: str
    seconds: float | None
    submitter: str = ""
    code: str = ""
    why: str = ""


def list_runs(server: ServerFolder, address: str = "") -> list[RunLine]:
    """List all runs, the newest first.

    Raises ControlError or QueueError where the SuperLink or the queue cannot be read.
    """
    with control_of(server, address) as control:
        runs = control.runs()
    entries = Queue(server).store.entries()
    waiting = [
        RunLine("", entry.name, entry.state, 0, rounds_of(server, entry.config), entry.submitted, None, entry.submitter, "", entry.why)
        for entry in entries
        if entry.state != STARTED and not any(entry.started_as(run) for run in runs)
    ]
    submitters = {entry.run: entry.submitter for entry in entries if entry.run}
    later = went_on(runs)
    return [*reversed(waiting), *(_run_line(server, run, submitters.get(str(run.id), ""), run.id in later) for run in runs)]


def went_on(runs: Sequence[Submitted]) -> set[int]:
    """Return the ids of runs with whose folder a later one went on. ``runs``: the newest first."""
    seen, found = set[str](), set[int]()
    for run in runs:
        if (name := run_name(run)) in seen:
            found.add(run.id)
        elif name:
            seen.add(name)
    return found


def abort(server: ServerFolder, name: str, address: str = "") -> str:
    """End a run, or take it out of the queue.

    Args:
        server: The server's folder.
        name: The run's name, or Flower's id.
        address: Of the Control API, if it is not the one in server.toml.

    Returns:
        A sentence on what became of the run.

    Raises:
        NoSuchRun: No run has this name or id.
        ControlError: The SuperLink does not answer.
        QueueError: The queue cannot be read or written.
    """
    queue = Queue(server)
    for entry in queue.waiting():
        if entry.name == name and queue.remove(entry):
            return f"{name} was taken out of the queue; it had not begun"
    with control_of(server, address) as control:
        run = _find(server, name, control)
        if run.status.startswith("finished"):
            return f"{name} had ended already: {run.status.removeprefix('finished:')}"
        control.stop(str(run.id))
    from fl_bn_site.submit import how_to_go_on  # imports torch, for which nobody should wait before the run is stopped

    return f"{run_name(run) or name} is stopped; {how_to_go_on(server, run_name(run))}"


def fetch(server: ServerFolder, name: str, destination: Path | None, address: str = "") -> str:
    """Copy a run's folder, or say where it is.

    Args:
        server: The server's folder.
        name: The run's name, or Flower's id.
        destination: The folder in which the copy is made, under the run's name; None: make no copy.
        address: Of the Control API, if it is not the one in server.toml.

    Returns:
        The path of the copy, or of the run's folder.

    Raises:
        NoSuchRun: No run has this name or id.
        NotHere: The files are on another machine. The message says where.
        FileExistsError: The copy's place is taken.
        OSError: The folder cannot be copied. No part of it stays at the destination.
    """
    source = server.results / name
    if not (source / "config.toml").exists():
        with control_of(server, address) as control:
            run = _find(server, name, control)
        source = folder_of(server, run.config, run_name(run))
    if not (source / "config.toml").exists():
        raise NotHere(f"{source} is not on this machine: on the server's, `fl-bn fetch` or e.g. scp -r copies it from there")
    if destination is None:
        return str(source)
    target = destination / source.name
    if target.exists():
        raise FileExistsError(f"{target} exists already: give another folder, or remove it")
    partial = destination / f".{source.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(".lock", ".unfinished-*"), copy_function=_copy_if_there)
        partial.rename(target)
    except shutil.Error as error:  # its text is a list of all files that could not be copied
        file, _, why = error.args[0][0]
        raise OSError(f"{file} could not be copied to {destination}: {why}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return str(target)


def folder_of(server: ServerFolder, config: Mapping[str, Any], name: str) -> Path:
    """Return the folder with a run's results.

    It is the one below this server's ``results``, where it exists, even if the run was submitted from another
    machine. Otherwise the run config names it.
    """
    here = server.results / name
    return here if here.exists() else Path(str(config.get("output", server.results))) / name


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a run's rounds.jsonl, to which a running run may still add."""
    file = folder / "rounds.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rounds_of(server: ServerFolder, config: Mapping[str, Scalar]) -> int:
    """Return how many rounds a run will have, from ``config`` or from the config in its folder; 0: not known yet."""
    if rounds := int(config.get("rounds", 0)):
        return rounds
    file = folder_of(server, config, str(config.get("resume") or config.get("name") or "")) / "config.toml"
    return int(tomllib.loads(file.read_text(encoding="utf-8")).get("rounds", 0)) if file.exists() else 0


def to_json(runs: list[RunLine]) -> str:
    """Return ``runs`` as a list in JSON."""
    return json.dumps([asdict(run) for run in runs], indent=1)


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file, unless it was deleted meanwhile: a run that goes on deletes its old checkpoints."""
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        if Path(source).exists():
            raise


def _run_line(server: ServerFolder, run: Submitted, submitter: str, resumed: bool) -> RunLine:
    name, state = run_name(run), run.status.removeprefix("finished:")
    rows = rows_of(folder_of(server, run.config, name)) if name and not resumed else []
    start = run.started or run.submitted
    end = run.ended or datetime.now().astimezone()
    return RunLine(
        str(run.id),
        name,
        "resumed" if resumed and run.status.startswith("finished") else state,
        None if resumed else rows[-1]["round"] if rows else 0,
        rounds_of(server, run.config),
        start.astimezone().isoformat(timespec="seconds") if start else "",
        round((end - start).total_seconds(), 1) if start else None,
        submitter,
        run.code,
    )


def _find(server: ServerFolder, name: str, control: Control) -> Submitted:
    """Return the newest run with this name or id. Raises NoSuchRun."""
    runs = control.runs()
    for run in runs:
        if name and name in (str(run.id), run_name(run)):
            return run
    known = ", ".join(dict.fromkeys(filter(None, map(run_name, runs[:5]))))
    raise NoSuchRun(f"{name} is no run of {server.path}: the last are {known or 'none'} (`fl-bn runs {server.path}`)")
