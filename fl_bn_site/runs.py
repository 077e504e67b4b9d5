"""Find out how far the runs of a server are, from the files in their folders; end a run: ``fl-bn abort``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_bn.support.flower_config import PROGRESS, Scalar
from fl_bn_site.control import Control, Submitted, control_of, lines_of
from fl_bn_site.folders import ServerFolder
from fl_bn_site.own_config import ROUNDS

NOT_TOLD = "its app has reported no rounds: only the strategies of fl_bn.flower report them"
NOT_RESUMED = "it ended early; fl-bn does not resume the run of a user's own Flower app, so submit it again"


def went_on(runs: Sequence[Submitted]) -> set[int]:
    """Return the ids of the runs that a later run resumed. ``runs`` has the newest run first."""
    named = [run for run in runs if run.name and not run.own]  # the run of a user's own Flower app is never resumed
    newest = {run.name: run.id for run in reversed(named)}
    return {run.id for run in named if run.id != newest[run.name]}


def abort(server: ServerFolder, name: str, address: str = "") -> str:
    """End a run.

    Args:
        server: The server's folder.
        name: The name of the run, or Flower's id of it.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.

    Returns:
        A sentence that says what was done.

    Raises:
        ValueError: No run has this name or id.
        ControlError: The SuperLink does not answer.
    """
    with control_of(server, address) as control:
        run = _find(server, name, control)
        if run.status.startswith("finished"):
            return f"{name} had ended already: {run.status.removeprefix('finished:')}"
        control.ask("stop", str(run.id))
    from fl_bn_site.submit import how_to_go_on  # imported here, since it imports torch: the run is stopped before that

    return f"{run.name or name} is stopped; {how_to_go_on(server, run.name, run.own)}"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``rounds.jsonl`` in the folder of a run, one per round.

    Where this file is missing, return the rows that a user's own Flower app has reported; where these are missing, too, an
    empty list. Lines are left out as ``lines_of`` says.
    """
    return lines_of(folder / "rounds.jsonl", "round") or [row for row in lines_of(folder / PROGRESS, "round") if row["round"]]


def rounds_of(server: ServerFolder, config: Mapping[str, Scalar]) -> int:
    """Return the planned number of rounds of a run; 0: not known yet.

    A user's own Flower app may have reported this number. Otherwise it is ``rounds`` or ``num-server-rounds`` in ``config``,
    or else ``rounds`` in the config.toml of the run's folder.

    Args:
        server: The server's folder.
        config: The keys of the run config that the user gave.
    """
    folder = server.results / str(config.get("resume") or config.get("name") or "")
    told = [int(row["rounds"]) for row in lines_of(folder / PROGRESS, "rounds")[-1:]]
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
    tells = not begun or (server.results / run.name / PROGRESS).exists()
    early = run.status.startswith("finished") and run.status != "finished:completed"
    return tells, "; ".join(note for note, holds in ((NOT_TOLD, not tells), (NOT_RESUMED, early)) if holds)


def _find(server: ServerFolder, name: str, control: Control) -> Submitted:
    """Return the newest run with this name or id.

    Raises:
        ValueError: No run has this name or id. The message names the last runs.
    """
    runs = control.runs()
    if found := next((run for run in runs if name and name in (str(run.id), run.name)), None):
        return found
    known = ", ".join(dict.fromkeys(run.name for run in runs[:5] if run.name))
    raise ValueError(f"no run of {server.path} is called {name}; the last runs are {known or 'none'} (`fl-bn status --all` shows all)")
