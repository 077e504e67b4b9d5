"""A run's checkpoints in its folder, and how to find the run that a config wants to go on with."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.log import LOGGER
from fl_bn.run.config import FIELDS, ConfigError, RunConfig
from fl_bn.run.history import History
from fl_bn.run.overrides import UNREADABLE
from fl_bn.support import durable
from fl_bn.support.wire import reason

FOLDER, CONFIG = "checkpoints", "config.toml"
AT_ONCE = 2  # the one before the last is there in case the last is damaged
FREE = {  # what may differ from the run that is resumed: none of it decides a number, but for last digits
    "name", "output", "resume", "checkpoint-every", "pictures", "callbacks", "device", "threads", "workers",
    "deterministic", "memory-format", "share-label-counts", "min-replies", "min-cohort", "clients-at-start", "client-nodes", "client-names",
    "max-failed-rounds", "round-timeout", "wait-timeout", "retry-timeout", "recalibration", "recalibration-memory",
    *(name for name in FIELDS if name.startswith("exchange")),
}  # fmt: skip


class Checkpoints:
    """Those in the run directory ``run``, written with the lengths of its ``history``."""

    def __init__(self, run: Path, history: History) -> None:
        self.folder, self._history = run / FOLDER, history

    def keep(self, checkpoint: Checkpoint) -> int:
        """Store it, beside the one before; the oldest round that there is then, 0 for none. A full disk is said in the log, and no more."""
        try:
            complete = replace(checkpoint, history=self._history.lengths())
            complete.save(self.folder / f"round-{checkpoint.round:06}{durable.SUFFIX}")
        except OSError as error:
            last = max(self.rounds(), default=0)
            LOGGER.warning("no checkpoint after round %s: %s. The last one is of round %s", checkpoint.round, error, last)
        for old in self.rounds()[:-AT_ONCE]:
            self._path(old).unlink(missing_ok=True)
        return min(self.rounds(), default=0)

    def newest(self) -> Checkpoint | None:
        """The newest that is whole; a damaged one is set aside, and said in the log."""
        for number in reversed(self.rounds()):
            path = self._path(number)
            try:
                return Checkpoint.load(path)
            except durable.Damaged as error:
                LOGGER.warning("%s. Set aside as %s; trying the checkpoint before it", error, durable.set_aside(path).name)
        return None

    def rounds(self) -> list[int]:
        names = (path.name.removeprefix("round-").removesuffix(durable.SUFFIX) for path in self.folder.glob(f"round-*{durable.SUFFIX}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, number: int) -> Path:
        return self.folder / f"round-{number:06}{durable.SUFFIX}"


def run_to_resume(config: RunConfig) -> Path:
    """The folder of the run that ``config.resume`` means: that name, or the newest unfinished one with the same config.

    Raises:
        ConfigError: there is none, or it was another run; the message says in which keys.
    """
    root = Path(config.output)
    if config.resume != "latest":
        named = root / config.resume
        if not list((named / FOLDER).glob(f"round-*{durable.SUFFIX}")):
            raise ConfigError(f"resume={config.resume!r}: {named} has no checkpoint: {_unfinished(root)}")
        if differing := _differences(named, config):
            raise ConfigError(f"resume={config.resume!r} was another run: {differing}. Give it the same run config")
        return named.resolve()
    runs = _with_checkpoints(root)
    if config.name:
        runs = [run for run in runs if run.name == config.name]
    for run in runs:
        if not _differences(run, config):
            return run.resolve()
    if runs:
        raise ConfigError(f"resume='latest': the newest unfinished run, {runs[0].name}, was another one: {_differences(runs[0], config)}")
    raise ConfigError(f"resume='latest': {_unfinished(root)}")


def _with_checkpoints(root: Path) -> list[Path]:
    """Runs with checkpoints, the newest checkpoint first; a run that is finished has none left."""
    newest = {
        path.parent.parent: path.stat().st_mtime
        for path in sorted(root.glob(f"*/{FOLDER}/round-*{durable.SUFFIX}"), key=lambda p: p.stat().st_mtime)
    }
    return sorted(newest, key=newest.__getitem__, reverse=True)


def _unfinished(root: Path) -> str:
    found = ", ".join(run.name for run in _with_checkpoints(root))
    return f"unfinished runs with checkpoints in {root}: {found or 'none (checkpoint-every makes them)'}"


def _differences(run: Path, config: RunConfig) -> str:
    """The keys that decide numbers in which the two differ, in words; empty if none."""
    try:
        values = tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE) as error:
        return f"its {CONFIG} cannot be read: {reason(str(error))}"
    mine = config.to_mapping()
    keys = [key for key in mine if key not in FREE and key not in config.without_effect]
    return ", ".join(f"{key} was {values.get(key)!r}, and is {mine[key]!r}" for key in keys if values.get(key) != mine[key])
