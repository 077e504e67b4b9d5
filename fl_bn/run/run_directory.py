"""A run's folder: files that people can open, written as the run goes, so that nothing is lost when it stops."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import tomli_w
from safetensors.torch import save

from fl_bn.derived import plain_names
from fl_bn.federation.callbacks import Callback
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.flower import RunFailed
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.log import LOGGER
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.options import Value
from fl_bn.run.assembly import task
from fl_bn.run.checkpoints import CONFIG, FOLDER, Checkpoints, run_to_resume
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.console import LogFile
from fl_bn.run.diagnostics import Diagnostics
from fl_bn.run.disclosure_report import FILE as DISCLOSURE
from fl_bn.run.disclosure_report import DisclosureTotals, disclosure_csv, disclosure_table
from fl_bn.run.environment import environment
from fl_bn.run.history import History
from fl_bn.run.interrupts import held
from fl_bn.run.recalibration_report import write_passes
from fl_bn.run.summary import summary
from fl_bn.run.tensorboard import TensorBoard
from fl_bn.run.testing import note_domains
from fl_bn.secure.privacy import Journal
from fl_bn.support import durable, extras
from fl_bn.support.flower_config import SERVER
from fl_bn.support.locks import release, take
from fl_bn.support.names import names_of

LOCK, LOG, RELEASES = ".lock", "run.log", "privacy.jsonl"


class RunDirectory(Callback):
    """Use as a context manager around the run that it is a callback of: entering opens the files, ``on_end`` writes model, pictures and
    summary, also after a failure. Leaving does so where the run never began.

    With ``output`` empty in the config nothing is written (``path`` is None), only the records are kept. ``resumed``: the checkpoint
    that the run goes on from, if any.
    """

    def __init__(self, config: RunConfig, path: Path | None, *, goes_on: bool = False) -> None:
        self.config, self.path, self._goes_on = config, path, goes_on
        self.records: list[RoundRecord] = []
        self._left = DisclosureTotals()
        self.strategy: BatchNormStrategy | None = None
        self.resumed: Checkpoint | None = None
        self._diagnostics = None if path is None else diagnostics_of(config)
        self.task = task(config)
        self._history = None if path is None else History(path, self._diagnostics is not None, self.task, config.called)
        self._checkpoints = None if path is None or self._history is None else Checkpoints(path, self._history)
        self._board = TensorBoard(path / "tensorboard", self.task) if path is not None and config.pictures else Callback()
        self._log = None if path is None else LogFile(path / LOG)
        self._lock: IO[str] | None = None
        self._ended = False

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """A new folder under ``output``, or the one that ``resume`` means.

        Raises:
            FileExistsError: a run of the given ``name`` is there already: none is overwritten.
            ConfigError: no folder can be made, there is nothing to resume, or the diagnostics cannot be made.
        """
        if not config.output:
            return cls(config, None)
        diagnostics_of(config)  # refused before there is a folder
        if config.resume:
            return cls(config, run_to_resume(config), goes_on=True)
        root = Path(config.output)
        stem = config.name or config.name_at(datetime.now())
        path, n = root / stem, 1
        try:
            while path.exists():
                if config.name:
                    raise FileExistsError(f"{path} exists already: give another name, remove it, or go on with resume={config.name!r}")
                n += 1
                path = root / f"{stem}-{n}"
            path.mkdir(parents=True)
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"output={config.output!r}: no folder for the run can be made there: {error}") from error
        return cls(config, path.resolve())

    @property
    def name(self) -> str:
        return "" if self.path is None else self.path.name

    def __enter__(self) -> Self:
        if self.path is None or self._history is None or self._checkpoints is None:
            return self
        self._lock = _locked(self.path)
        try:
            if self._goes_on:
                self.resumed = self._checkpoints.newest()
                if self.resumed is None:
                    raise ConfigError(f"{self.path}: none of its checkpoints is whole: start the run anew")
                for record in self._history.cut(self.resumed.history):
                    self._keep(record)
            else:
                durable.write(self.path / CONFIG, to_toml(self.config.to_mapping()).encode(), mode=0o666)
                self._history.begin()
            durable.write(self.path / "environment.json", (json.dumps(environment(), indent=2) + "\n").encode(), mode=0o666)
        except BaseException:
            self._unlock(self.path)
            raise
        if self._log is not None:
            LOGGER.addHandler(self._log)
        LOGGER.info("run directory: %s", shown(self.path))
        return self

    def start(self, strategy: BatchNormStrategy) -> None:
        """Tell whose model to save at the end, and whose releases to keep count of."""
        self.strategy = strategy
        if self.path is not None and strategy.secure is not None and strategy.secure.accountant is not None:
            strategy.secure.accountant.keep_in(Journal(self.path / RELEASES))

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Note the metric of every domain, for the callbacks that follow, too."""
        note_domains(self.config, record)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Append one round to every file that grows; Ctrl-C waits until it is in all of them."""
        with held():
            self._keep(record)
            if len(self.records) == 1:  # those before round 1 are over, and a run that is resumed makes none
                self._write_passes()
            if self._history is not None:
                measured = []
                if self._diagnostics is not None and self.strategy is not None:
                    measured = [row._asdict() for row in self._diagnostics.after_round(record, self.strategy.shared.model)]
                self._history.add(record, measured)
            self._board.on_round(record, rounds)

    def keep_checkpoint(self, checkpoint: Checkpoint) -> int:
        """Store it; the oldest round that the run can go back to."""
        return 0 if self._checkpoints is None else self._checkpoints.keep(checkpoint)

    def on_end(self, error: BaseException | None) -> None:
        if self.path is None or self._ended:
            return
        self._ended = True
        try:
            self._board.on_end(error)
            self._finish(self.path, error)
        except OSError as problem:
            LOGGER.error("not all of the results could be written to %s: %s", self.path, problem)
            if error is None:
                raise RunFailed(
                    f"the run is trained, but its results could not be written ({problem}). Make room, and go on with "
                    f"resume={self.name!r}, if it has checkpoints"
                ) from problem

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.on_end(error)
        finally:
            if self._log is not None:
                LOGGER.removeHandler(self._log)
                self._log.close()
            if self.path is not None:
                self._unlock(self.path)

    def _unlock(self, path: Path) -> None:
        if self._lock is not None:
            release(self._lock, path / LOCK)
            self._lock = None

    def _keep(self, record: RoundRecord) -> None:
        """What left the clients, most of a record, is summed up."""
        self.records.append(replace(record, disclosures=[]))
        self._left.add(record)

    def _finish(self, path: Path, error: BaseException | None) -> None:
        assert self._history is not None
        counts: dict[int, tuple[int, ...]] = {}
        if self.strategy is not None:
            self._save_model(self.strategy)
            population = self.strategy.population
            counts = {c.index: c.label_counts for c in population.everyone()} if population else {}
        passes = [] if self.strategy is None else self.strategy.statistics.outcomes
        left = self._left.kinds(counts)
        (path / DISCLOSURE).write_text(disclosure_csv(left, self.config.called), newline="")
        accountant = self.strategy.secure.accountant if self.strategy and self.strategy.secure else None
        privacy = "" if accountant is None else accountant.statement()
        told = disclosure_table(left, self.config.called)
        said = summary(self.config, self.records, error, passes, told, privacy, self.task)
        durable.write(path / "summary.md", said.encode(), mode=0o666)
        self._write_passes()
        draws = self.config.pictures and self._can_draw()
        if draws and passes:
            from fl_bn.run.recalibration_picture import draw_passes  # imports matplotlib

            draw_passes(self.config, passes, self.records, path / "recalibration.png", self.task)
        if draws and self.records:
            from fl_bn.run.pictures import draw_labels, draw_run  # imports matplotlib, a second that round 1 need not wait for

            if self.config.rounds:
                draw_run(self.config, self.records, path / f"{self.task.metric}.png", self.task)
            if counts and all(counts.values()):
                draw_labels(counts, self.config, path / "labels.png")
        self._history.lengths()
        if error is None:  # nobody will go back
            for folder in (path / FOLDER, *path.glob("state-*")):
                shutil.rmtree(folder, ignore_errors=True)
        LOGGER.info("results: %s", shown(path))
        if error is not None:
            self._say_how_to_go_on(path, "interrupted" if isinstance(error, KeyboardInterrupt) else "the run failed")

    def _say_how_to_go_on(self, path: Path, what: str) -> None:
        last = max(self._checkpoints.rounds(), default=0) if self._checkpoints else 0
        server = os.environ.get(SERVER, "")
        if last:
            run = f"{shlex.quote(server)} {path.name}" if server else shown(path)
            advice = f"Go on from round {last}: fl-bn resume {run}"
        elif self.config.checkpoint_every:
            advice = f"Start it again: the first checkpoint would be after round {self.config.checkpoint_every}"
        else:
            advice = "It cannot go on, since it has no checkpoints: checkpoint-every=5 makes them"
        LOGGER.info("%s after round %s of %s. %s", what, len(self.records), self.config.rounds, advice)

    def _can_draw(self) -> bool:
        told = extras.lacking("a run that is to end with pictures", "matplotlib", "tensorboard")
        if told:
            LOGGER.warning("there are no pictures: %s", told)
        return not told

    def _write_passes(self) -> None:
        if self.path is not None and self.strategy is not None and (passes := self.strategy.statistics.outcomes):
            write_passes(passes, self.path / "recalibration.csv")

    def _save_model(self, strategy: BatchNormStrategy) -> None:
        """The shared model, as evaluated last, by the names of the unconverted network: all of it but what stays home.

        Of methods that replace BatchNorm (gn and its kin, FedWon, ...): by those of the converted network.
        """
        assert self.path is not None
        metadata = {"method": self.config.method, "model": self.config.model, "rounds": str(min(len(self.records), self.config.rounds))}
        tensors = strategy.shared.whole(strategy.shared.tensors(), batches_trained(self.records))
        durable.write(self.path / "model.safetensors", durable.in_order(save(tensors, metadata)), mode=0o666)

        if strategy.unseen:
            plain = plain_names(strategy.shared.model)
            told = {plain[name]: tensor for name, tensor in strategy.unseen.items()}
            durable.write(self.path / "unseen-client.safetensors", durable.in_order(save(told, metadata)), mode=0o666)


def shown(path: Path) -> str:
    """As one would type it here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def diagnostics_of(config: RunConfig) -> Diagnostics | None:
    """What is measured beside the evaluations. Raises ConfigError where it cannot be."""
    names = names_of(config.diagnostics)
    return Diagnostics(config, names) if names else None


def _locked(path: Path) -> IO[str]:
    """Hold the run's folder against a second process, as long as this one lives. Raises RunFailed where another holds it."""

    def warn() -> None:
        LOGGER.warning("%s cannot be locked: see to it that no second process goes on with the same run", path)

    try:
        return take(path / LOCK, warn)
    except BlockingIOError as error:
        raise RunFailed(f"{path} is still being written by another process: end that run first") from error


def to_toml(values: Mapping[str, Value]) -> str:
    """Return ``values`` as flat TOML, in the order given."""
    return tomli_w.dumps(values)
