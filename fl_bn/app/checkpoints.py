"""Store the checkpoints of a run in its folder, and find the run to resume, with its run config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.app.former import CONFIG as CONFIG
from fl_bn.app.former import values_of
from fl_bn.app.history import LINES, History
from fl_bn.app.summary import ended
from fl_bn.app.usage import Usage
from fl_bn.flower.compat import LOGGER
from fl_bn.flower.recovery import Checkpoint
from fl_bn.support import durable
from fl_bn.support.extras import ABSENT, version_of

FOLDER, LOCK = "checkpoints", ".lock"
AT_ONCE = 2  # how many checkpoints are kept: the last, and the one before it in case the last is damaged
FREE = {  # run-config keys in which a resumed run may differ: they change at most last digits
    "name", "output", "resume", "run-signature", "checkpoint-every", "pictures", "callbacks", "early-stop", "keep-best", "device",
    "threads", "workers", "deterministic", "memory-format", "min-replies", "min-cohort", "clients-at-start",
    "min-sites", "client-nodes", "client-names", "max-failed-rounds", "round-timeout", "wait-timeout", "retry-timeout",
    "recalibration", "exchange",
}  # fmt: skip


class Checkpoints:
    """Store and load the checkpoints of one run.

    A checkpoint stores the lengths of the files in ``history``, to which a resumed
    run cuts them.
    """

    def __init__(self, run: Path, history: History) -> None:
        self.folder, self._history = run / FOLDER, history

    def keep(self, checkpoint: Checkpoint) -> int:
        """Store a checkpoint, and keep the one before. Return the oldest round that has one, or 0.

        If it cannot be written, for example because the disk is full, a warning is
        logged, and the run goes on.
        """
        try:
            replace(checkpoint, history=self._history.lengths()).save(self._path(checkpoint.round))
        except OSError as error:
            last = max(self.rounds(), default=0)
            LOGGER.warning("no checkpoint after round %s: %s. The last one is of round %s (0: none)", checkpoint.round, error, last)
        for old in self.rounds()[:-AT_ONCE]:
            self._path(old).unlink(missing_ok=True)
        return min(self.rounds(), default=0)

    def newest(self) -> Checkpoint | None:
        """Load the newest checkpoint, if any. Damaged ones are renamed, with a warning."""
        for number in reversed(self.rounds()):
            path = self._path(number)
            try:
                return Checkpoint.load(path)
            except durable.Damaged as error:
                LOGGER.warning("%s. It was renamed to %s; trying the checkpoint before it", error, durable.set_aside(path).name)
        return None

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, in order."""
        names = (path.name.removeprefix("round-").removesuffix(durable.SUFFIX) for path in self.folder.glob(f"round-*{durable.SUFFIX}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, number: int) -> Path:
        return self.folder / f"round-{number:06}{durable.SUFFIX}"


def run_to_resume(config: RunConfig) -> Path:
    """Find the folder of the run to resume.

    The key ``resume`` is the name of the run, or ``latest`` for the newest
    unfinished one with the same run config, except for keys in ``FREE``. If
    ``name`` is set, it is the run's. ``ConfigError``: there is no such run, or
    other keys differ.
    """
    root = Path(config.output)
    files = sorted(root.glob(f"*/{FOLDER}/round-*{durable.SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    runs = dict.fromkeys(file.parents[1] for file in files)  # a finished run has no checkpoints any more
    wanted = config.name if config.resume == "latest" else config.resume
    named = [run for run in runs if wanted in ("", run.name)]
    differing = {run: _differences(run, config) for run in named}
    for run in named:
        if not differing[run]:
            return run.absolute()  # as clients find it
    if named:
        raise ConfigError(f"resume={config.resume!r}: {named[0].name} has another run config: {differing[named[0]]}. Give the same values")
    there = ", ".join(run.name for run in runs) or "none (checkpoint-every makes them)"
    raise ConfigError(f"resume={config.resume!r}: expected an unfinished run with checkpoints in {root}, which has {there}")


def _differences(run: Path, config: RunConfig) -> str:
    """Return a list of the keys that differ from ``config`` and change results, as text."""
    try:
        values = values_of(run)
        _check_version(run)
    except ConfigError as error:
        return str(error)
    mine, defaults = config.to_mapping(), {name: key.default for name, key in config.keys(config.setup).items()}
    was = {**defaults, **values}  # an earlier version did not have all keys
    keys = [key for key in mine if key not in FREE and key not in config.without_effect]
    return ", ".join(f"{key} was {was[key]!r}, and is {mine[key]!r}" for key in keys if was[key] != mine[key])


def config_to_resume(run: Path, *, deployed: bool = False) -> RunConfig:
    """Return the run config in the folder of a run, with ``resume`` set to the name of the run.

    Raises:
        ConfigError: ``run`` is not the folder of a run; it is finished, has a key
            that has gone, or was made by another version of fl-bn; it is
            ``deployed`` (at sites) and has no checkpoint; or it is a run of sites,
            but not to be ``deployed``.
    """
    values = values_of(run)
    _check_version(run)
    config = Usage().config({**values, "output": str(run.resolve().parent), "name": "", "resume": run.resolve().name})
    if ended(run / "summary.md") and not (run / FOLDER).exists():
        raise ConfigError(f"{run} is finished, after {rounds_done(run)} rounds, and {run / 'summary.md'} has the results")
    if deployed and not list((run / FOLDER).glob(f"round-*{durable.SUFFIX}")):
        raise ConfigError(f"{run} has no checkpoint to go on from (checkpoint-every makes them): submit the run anew")
    if not deployed and (config.dataset == SITES or config.client_nodes):
        raise ConfigError(f"{run} is a run of deployed sites: use fl-bn resume SERVER {config.resume} (SERVER: the server's folder)")
    return config


def _check_version(run: Path) -> None:
    """Raise ``ConfigError`` if another version of fl-bn, with perhaps other numbers, made the run."""
    try:
        was = str(json.loads((run / "environment.json").read_text())["packages"]["fl-bn"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # an early version did not write this file, or the run was killed before it was written
    if was not in (ABSENT, here := version_of("fl-bn")):
        raise ConfigError(f"{run} was made by fl-bn {was}, and this is {here}: install {was} to resume the run, or start the run anew")


def rounds_done(run: Path) -> int:
    """Return how many rounds the folder of a run has."""
    file = run / LINES
    return file.read_bytes().count(b"\n") if file.exists() else 0
