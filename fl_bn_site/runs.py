"""List the runs of a server, or end a run: ``fl-bn runs`` and ``fl-bn abort``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fl_bn.support.flower_config import PROGRESS, Scalar
from fl_bn_site.control import Control, control_of
from fl_bn_site.folders import ServerFolder
from fl_bn_site.own_config import ROUNDS
from fl_bn_site.registered import Submitted, run_name
from fl_bn_site.signing import signer_of
from fl_bn_site.submitters import known

ACTIVE = ("pending", "starting", "running")
NOT_TOLD = "its app has reported no rounds: only the strategies of fl_bn.flower report them"
NOT_RESUMED = "it ended early; fl-bn does not resume the run of a user's own Flower app, so submit it again"


class NoSuchRun(ValueError):
    """Signal that no run has this name or id."""


@dataclass(frozen=True)
class RunLine:
    """Describe a run, as one line of ``fl-bn runs``.

    Attributes:
        id: Flower's id of the run.
        name: The name of the run's folder.
        state: ``pending``, ``starting``, ``running``, ``completed``, ``failed`` or ``stopped``; ``resumed``: the run ended
            early, and a later run went on with its folder.
        round: The number of the last complete round; 0: no round is complete; None: not known. It is not known where a
            later run went on with the folder, or where a user's own Flower app does not report its rounds.
        rounds: The number of rounds of the whole run; 0: not known yet.
        start: When the run started, or was submitted if it has not started, in ISO 8601.
        seconds: The seconds from ``start`` until the run ended, or until now; None: not known.
        submitter: Who has signed the run, if the server's folder has that key; empty: not known. Sites check it, not the server.
        code: The SHA-256 of the app that the sites receive.
        note: A remark on the run of a user's own Flower app, to print below the table; empty: there is none.
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
    note: str = ""


def list_runs(server: ServerFolder, address: str = "") -> list[RunLine]:
    """Return all runs of a server, the newest first.

    Args:
        server: The server's folder.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Raises:
        ControlError: The SuperLink does not answer.
        FolderError: A public key in the server's folder ``submitters`` cannot be read.
    """
    with control_of(server, address) as control:
        runs = control.runs()
    later, submitters = went_on(runs), known(server.path)
    return [_run_line(server, run, signer_of(run.config, submitters), run.id in later) for run in runs]


def went_on(runs: Sequence[Submitted]) -> set[int]:
    """Return the ids of the runs that a later run resumed. ``runs`` has the newest run first."""
    seen, found = set[str](), set[int]()
    for run in runs:
        if run.own:  # the run of a user's own Flower app is never resumed
            continue
        if (name := run_name(run)) in seen:
            found.add(run.id)
        elif name:
            seen.add(name)
    return found


def abort(server: ServerFolder, name: str, address: str = "") -> str:
    """End a run.

    Args:
        server: The server's folder.
        name: The name of the run, or Flower's id of it.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Returns:
        A sentence that says what was done.

    Raises:
        NoSuchRun: No run has this name or id.
        ControlError: The SuperLink does not answer.
    """
    with control_of(server, address) as control:
        run = _find(server, name, control)
        if run.status.startswith("finished"):
            return f"{name} had ended already: {run.status.removeprefix('finished:')}"
        control.stop(str(run.id))
    from fl_bn_site.submit import how_to_go_on  # imported here, since it imports torch: the run is stopped before that

    return f"{run_name(run) or name} is stopped; {how_to_go_on(server, run_name(run), run.own)}"


def folder_of(server: ServerFolder, config: Mapping[str, Any], name: str) -> Path:
    """Return the folder with the results of a run.

    Args:
        server: The server's folder. If its ``results`` has a folder ``name``, that folder is returned, even if the
            run was submitted from another machine.
        config: The run config. Its ``output`` is the folder of results where ``server`` has no folder ``name``.
        name: The name of the run.
    """
    here = server.results / name
    return here if here.exists() else Path(str(config.get("output", server.results))) / name


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``rounds.jsonl`` in the folder of a run, one per round.

    Where this file is missing, return the rows that a user's own Flower app has reported; where these are missing, too, an
    empty list. An incomplete last line, which an active run is writing, is left out.
    """
    return _lines(folder / "rounds.jsonl") or [row for row in _lines(folder / PROGRESS) if row["round"]]


def _lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rounds_of(server: ServerFolder, config: Mapping[str, Scalar]) -> int:
    """Return the planned number of rounds of a run; 0: not known yet.

    A user's own Flower app may have reported this number. Otherwise it is ``rounds`` or ``num-server-rounds`` in ``config``,
    or else ``rounds`` in the config.toml of the run's folder.

    Args:
        server: The server's folder.
        config: The keys of the run config that the user gave.
    """
    folder = folder_of(server, config, str(config.get("resume") or config.get("name") or ""))
    told = [int(row["rounds"]) for row in _lines(folder / PROGRESS)[-1:]]
    planned = [value for key in ("rounds", ROUNDS) if type(value := config.get(key)) is int and value > 0]
    if known := [number for number in (*told, *planned) if number]:
        return known[0]
    file = folder / "config.toml"
    return int(tomllib.loads(file.read_text(encoding="utf-8")).get("rounds", 0)) if file.exists() else 0


def about_own(server: ServerFolder, run: Submitted) -> tuple[bool, str]:
    """Return whether a run reports how many rounds are done, and a note on the run of a user's own app (empty: no note).

    As long as a run has not begun, it is taken to report its rounds.

    Args:
        server: The server's folder.
        run: The run, as the SuperLink describes it.
    """
    if not run.own:
        return True, ""
    begun = run.status == "running" or run.status.startswith("finished")
    tells = not begun or (folder_of(server, run.config, run_name(run)) / PROGRESS).exists()
    early = run.status.startswith("finished") and run.status != "finished:completed"
    return tells, "; ".join(note for note, holds in ((NOT_TOLD, not tells), (NOT_RESUMED, early)) if holds)


def to_json(runs: list[RunLine]) -> str:
    """Return ``runs`` as a JSON list of objects."""
    return json.dumps([asdict(run) for run in runs], indent=1)


def _run_line(server: ServerFolder, run: Submitted, submitter: str, resumed: bool) -> RunLine:
    name, state = run_name(run), run.status.removeprefix("finished:")
    rows = rows_of(folder_of(server, run.config, name)) if name and not resumed else []
    tells, note = about_own(server, run)
    start = run.started or run.submitted
    end = run.ended or datetime.now().astimezone()
    return RunLine(
        str(run.id),
        name,
        "resumed" if resumed and run.status.startswith("finished") else state,
        None if resumed or not tells else rows[-1]["round"] if rows else 0,
        rounds_of(server, run.config),
        start.astimezone().isoformat(timespec="seconds") if start else "",
        round((end - start).total_seconds(), 1) if start else None,
        submitter,
        run.code,
        note=note,
    )


def _find(server: ServerFolder, name: str, control: Control) -> Submitted:
    """Return the newest run with this name or id.

    Raises:
        NoSuchRun: No run has this name or id. The message names the last runs.
    """
    runs = control.runs()
    for run in runs:
        if name and name in (str(run.id), run_name(run)):
            return run
    known = ", ".join(dict.fromkeys(filter(None, map(run_name, runs[:5]))))
    raise NoSuchRun(f"no run of {server.path} is called {name}; the last runs are {known or 'none'} (`fl-bn runs {server.path}` shows all)")
