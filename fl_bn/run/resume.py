"""Make the run config with which an interrupted run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

from fl_bn.run.checkpoints import FOLDER
from fl_bn.run.config import SITES, ConfigError, RunConfig
from fl_bn.run.former import values_of
from fl_bn.run.usage import Usage
from fl_bn.support.durable import SUFFIX
from fl_bn.support.extras import ABSENT, version_of


def config_to_resume(run: Path, *, deployed: bool = False) -> RunConfig:
    """Return the run config in the folder of a run, with ``resume`` set to the name of the run.

    Args:
        run: The folder of the run.
        deployed: Whether the run is resumed at its sites; else in this process.

    Raises:
        ConfigError: ``run`` is not the folder of a run; or it has a key that has gone; or the run is finished or was made by
            another version of fl-bn; or ``deployed`` is True and the run has no checkpoint; or ``deployed`` is False and the
            run is one of deployed sites.
    """
    values = values_of(run)
    _check_version(run)
    config = Usage().config({**values, "output": str(run.resolve().parent), "name": "", "resume": run.resolve().name})
    done = _rounds_done(run)
    if done >= config.rounds and (run / "summary.md").exists() and not (run / FOLDER).exists():
        raise ConfigError(f"{run} is finished: all of its {config.rounds} rounds are done, and {run / 'summary.md'} has the results")
    if deployed and not list((run / FOLDER).glob(f"round-*{SUFFIX}")):
        raise ConfigError(f"{run} has no checkpoint to go on from (checkpoint-every makes them): submit the run anew")
    if not deployed and (config.dataset == SITES or config.client_nodes):
        name = run.resolve().name
        raise ConfigError(f"{run} is a run of deployed sites: use fl-bn resume SERVER {name}. SERVER is the server's folder: kit/server")
    return config


def _check_version(run: Path) -> None:
    """Raise ConfigError if the run was made by another version of fl-bn, which may compute other numbers."""
    try:
        was = str(json.loads((run / "environment.json").read_text())["packages"]["fl-bn"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # an early version did not write this file, or the run was killed before it was written
    if was not in (ABSENT, here := version_of("fl-bn")):
        raise ConfigError(f"{run} was made by fl-bn {was}, and this is {here}: install {was} to resume the run, or start the run anew")


def _rounds_done(run: Path) -> int:
    file = run / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0
