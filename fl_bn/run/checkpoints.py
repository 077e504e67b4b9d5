"""Store the checkpoints of a run in its folder, and find the run that the run-config key ``resume`` names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fl_bn.flower.compat import LOGGER
from fl_bn.flower.recovery import Checkpoint
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.former import CONFIG as CONFIG
from fl_bn.run.former import values_of
from fl_bn.run.history import History
from fl_bn.support import durable

FOLDER = "checkpoints"
AT_ONCE = 2  # how many checkpoints are kept: the last, and the one before it in case the last is damaged
FREE = {  # run-config keys that may differ from those of the resumed run, since they change only the last digits of numbers
    "name", "output", "resume", "run-signature", "checkpoint-every", "pictures", "callbacks", "early-stop", "keep-best", "device",
    "threads", "workers", "deterministic", "memory-format", "min-replies", "min-cohort", "clients-at-start",
    "min-sites", "client-nodes", "client-names", "max-failed-rounds", "round-timeout", "wait-timeout", "retry-timeout",
    "recalibration", "exchange",
}  # fmt: skip


class Checkpoints:
    """Store and load the checkpoints of one run.

    Args:
        run: The folder of the run.
        history: The files to which every round is appended. A checkpoint stores their lengths. A resumed run cuts the
            files to these lengths.
    """

    def __init__(self, run: Path, history: History) -> None:
        self.folder, self._history = run / FOLDER, history

    def keep(self, checkpoint: Checkpoint) -> int:
        """Store a checkpoint beside the previous one, and delete older ones.

        If the checkpoint cannot be written, for example because the disk is full, a warning is logged, and the run goes on without it.

        Returns:
            The oldest round that has a checkpoint now; 0: there is none.
        """
        try:
            complete = replace(checkpoint, history=self._history.lengths())
            complete.save(self.folder / f"round-{checkpoint.round:06}{durable.SUFFIX}")
        except OSError as error:
            last = max(self.rounds(), default=0)
            LOGGER.warning(
                "no checkpoint after round %s: %s. The last one is of round %s (0: there is none)", checkpoint.round, error, last
            )
        for old in self.rounds()[:-AT_ONCE]:
            self._path(old).unlink(missing_ok=True)
        return min(self.rounds(), default=0)

    def newest(self) -> Checkpoint | None:
        """Load the newest checkpoint that is not damaged; None: there is none.

        Damaged checkpoints are renamed, with a warning.
        """
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

    Args:
        config: The run config. ``resume`` is the name of the run, or ``latest`` for the newest unfinished run with the same
            run config, except for keys in ``FREE``. If ``name`` is set, only the run of this name counts.

    Raises:
        ConfigError: There is no such run, or its run config differs in other keys. The message names these keys.
    """
    root = Path(config.output)
    files = sorted(root.glob(f"*/{FOLDER}/round-*{durable.SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
    runs = dict.fromkeys(file.parents[1] for file in files)  # a finished run has no checkpoints any more
    wanted = config.name if config.resume == "latest" else config.resume
    named = [run for run in runs if wanted in ("", run.name)]
    differing = {run: _differences(run, config) for run in named}
    for run in named:
        if not differing[run]:
            return run.resolve()
    if named:
        raise ConfigError(f"resume={config.resume!r}: {named[0].name} has another run config: {differing[named[0]]}. Give the same values")
    there = ", ".join(run.name for run in runs) or "none (checkpoint-every makes them)"
    raise ConfigError(f"resume={config.resume!r}: expected an unfinished run with checkpoints in {root}, which has {there}")


def _differences(run: Path, config: RunConfig) -> str:
    """Return a text that lists the keys whose values differ from ``config`` and change results; empty: there are none."""
    try:
        values = values_of(run)
    except ConfigError as error:
        return str(error)
    mine, defaults = config.to_mapping(), {name: key.default for name, key in config.keys(config.setup).items()}
    was = {**defaults, **values}  # an earlier version did not have all keys
    keys = [key for key in mine if key not in FREE and key not in config.without_effect]
    return ", ".join(f"{key} was {was[key]!r}, and is {mine[key]!r}" for key in keys if was[key] != mine[key])
