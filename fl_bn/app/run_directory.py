"""Write the folder of a run during the run, so that an early end loses no results."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import tomli_w
import torch

from fl_bn.app.assembly import task
from fl_bn.app.checkpoints import CONFIG, FOLDER, LOCK, Checkpoints, run_to_resume
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.console import LogFile
from fl_bn.app.disclosure_report import FILE as DISCLOSURE
from fl_bn.app.disclosure_report import DisclosureTotals, disclosure_csv, disclosure_table
from fl_bn.app.history import History
from fl_bn.app.summary import summary
from fl_bn.app.testing import note_domains
from fl_bn.bn.derived import plain_names
from fl_bn.federation.callbacks import Callback, Running
from fl_bn.federation.composition import describe_layers
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import RunFailed
from fl_bn.flower.compat import LOGGER
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.flower.recovery import Checkpoint
from fl_bn.secure.privacy import Journal
from fl_bn.support import durable, extras
from fl_bn.support.commit import commit
from fl_bn.support.flower_config import SERVER

LOG, RELEASES = "run.log", "privacy.jsonl"
PACKAGES = ("fl-bn", "flwr", "ray", "torch", "torchvision", "numpy", "grpcio", "safetensors", "scikit-learn")


class RunDirectory(Callback):
    """Write the folder of one run, as a callback of the run and as a context manager around it.

    Entering the context opens the files. ``on_end`` writes the model, the pictures
    and the summary, also after a failure. Leaving calls it if the run did not.
    Without ``output`` in the run config, records are kept in memory and nothing is
    written.

    Attributes:
        path: The folder; None: the run has no output.
        records: The records of the rounds so far.
        transport: The transport of the run; None before ``start``.
        resumed: The checkpoint from which the run is resumed, if so.
    """

    centralised = False  # whether one network is trained on all clients' data

    def __init__(self, config: RunConfig, path: Path | None, *, goes_on: bool = False) -> None:
        self.config, self.path, self._goes_on = config, path, goes_on
        self.records: list[RoundRecord] = []
        self._disclosed = DisclosureTotals()
        self.transport: GridTransport | None = None
        self.resumed: Checkpoint | None = None
        self._diagnostics = None if path is None else config.changes.measurements(config)
        self.task = task(config)
        self._history = None if path is None else History(path, self._diagnostics is not None, self.task, config.called)
        self._checkpoints = None if path is None or self._history is None else Checkpoints(path, self._history)
        self._log = None if path is None else LogFile(path / LOG)
        self._lock: IO[str] | None = None
        self._ended = False
        self._running: Running | None = None

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make a new folder in ``output``, or open the folder of the run to resume.

        Raises:
            FileExistsError: A run with this ``name`` exists. It is not overwritten.
            ConfigError: The folder cannot be made, there is no run to resume, or
                diagnostics cannot be measured.
        """
        if not config.output:
            return cls(config, None)
        config.changes.measurements(config)  # raises ConfigError before a folder is made
        if config.resume:
            return cls(config, run_to_resume(config), goes_on=True)
        root = Path(config.output)
        stem = config.name or config.name_at(datetime.now())
        path, n = root / stem, 1
        try:
            while (there := path.exists()) and not config.name:
                n += 1
                path = root / f"{stem}-{n}"
            path.mkdir(parents=True, exist_ok=there)
        except OSError as error:
            raise ConfigError(f"output={config.output!r}: the run's folder cannot be made there: {error}") from error
        if there:
            raise FileExistsError(f"{path} exists already: give another name, remove {path}, or go on with resume={config.name!r}")
        return cls(config, path.resolve())

    @property
    def name(self) -> str:
        """Return the name of the folder; empty: the run has no output."""
        return "" if self.path is None else self.path.name

    def __enter__(self) -> Self:
        if self.path is None or self._history is None or self._checkpoints is None:
            return self
        self._lock = _locked(self.path)
        try:
            if self._goes_on:
                self.resumed = self._checkpoints.newest()
                if self.resumed is None:
                    raise ConfigError(f"{self.path} cannot be resumed, since all of its checkpoints are damaged: start the run anew")
                own = self.resumed.run_id.run.split("/")[-1]
                if (self.path / own).exists():  # clients' states move along
                    self.resumed = replace(self.resumed, run_id=replace(self.resumed.run_id, run=f"{self.name}/{own}"))
                for record in self._history.cut(self.resumed.history):
                    self._keep(record)
            else:
                durable.write(self.path / CONFIG, tomli_w.dumps(self.config.to_mapping()).encode(), mode=0o666)
                self._history.begin()
            durable.write(self.path / "environment.json", (json.dumps(environment(), indent=2) + "\n").encode(), mode=0o666)
        except BaseException:
            self._unlock(self.path)
            raise
        if self._log is not None:
            LOGGER.addHandler(self._log)
        LOGGER.info("run directory: %s", as_typed(self.path))
        if self._goes_on and self._diagnostics is not None:
            LOGGER.warning("measurements over several rounds (diagnostics.csv) begin anew: they know the evaluations from now on")
        return self

    def start(self, transport: GridTransport) -> None:
        """Store the transport, whose model is saved at the end, and record noisy sums in privacy.jsonl."""
        self.transport = transport
        if self.path is not None and transport.secure is not None and transport.secure.accountant is not None:
            transport.secure.accountant.keep_in(Journal(self.path / RELEASES))

    def on_start(self, running: Running) -> None:
        """Pass the records of a resumed run's earlier rounds to the callbacks after this one."""
        self._running = running
        running.history = tuple(self.records)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Add the metric of every domain to the record, for the callbacks after this one."""
        note_domains(self.config, record)

    def on_round(self, record: RoundRecord, rounds: int) -> None:
        """Append a round to rounds.csv and the other files with lines per round."""
        self._keep(record)
        if len(self.records) == 1:  # passes precede round 1, and a resumed run makes none
            self._add_passes()
        if self._history is not None:
            measured = []
            if self._diagnostics is not None and self.transport is not None:
                measured = [row._asdict() for row in self._diagnostics.after_round(record, self.transport.shared.model)]
            self._history.add(record, measured)

    def keep_checkpoint(self, checkpoint: Checkpoint) -> int:
        """Store a checkpoint, and return the oldest round to which the run can go back, or 0."""
        return 0 if self._checkpoints is None else self._checkpoints.keep(checkpoint)

    def on_end(self, error: BaseException | None) -> None:
        """Write the model, the pictures and the summary, unless this was done before.

        Without ``error``, the run is complete; if its results cannot be written,
        ``RunFailed`` is raised.
        """
        if self.path is None or self._ended:
            return
        self._ended = True
        try:
            self._finish(self.path, error)
        except OSError as problem:
            LOGGER.error("some results could not be written to %s: %s", self.path, problem)
            if error is None:
                raise RunFailed(f"results could not be written ({problem}): free disk space, then resume or rerun") from problem

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
            durable.release(self._lock, path / LOCK)
            self._lock = None

    def _keep(self, record: RoundRecord) -> None:
        """Keep the record without its disclosures, which are large, and add these to the totals."""
        self.records.append(replace(record, disclosures=[]))
        self._disclosed.add(record)

    def _finish(self, path: Path, error: BaseException | None) -> None:
        assert self._history is not None
        config, transport = self.config, self.transport
        population = None if transport is None else transport.population
        counts = {c.index: c.label_counts for c in population.everyone()} if population else {}
        passes = [] if transport is None else transport.statistics.outcomes
        if transport is not None and (error is None or self.records or passes):  # else nothing was trained or measured
            self._save_model(path, transport)
        kinds = self._disclosed.kinds(counts)
        durable.write(path / DISCLOSURE, disclosure_csv(kinds, config.called).encode(), mode=0o666)
        self._add_passes()
        accountant = transport.secure.accountant if transport and transport.secure else None
        text = summary(
            config,
            self.records,
            error,
            passes,
            disclosure_table(kinds, config.called),
            privacy="" if accountant is None else accountant.statement(),
            task=self.task,
            absent=[f"{config.called.client(index)}: {why}" for index, why in population.absent.items()] if population else [],
            early=self._running.reason if self._running else "",
            centralised=self.centralised,
            layers=[*describe_layers(transport.server.source, transport.shared.model, transport.method)] if transport else [],
        )
        durable.write(path / "summary.md", text.encode(), mode=0o666)
        self._history.lengths()
        self._draw(path, counts)
        if error is None:  # complete, so never resumed
            for folder in (path / FOLDER, *path.glob("state-*")):
                shutil.rmtree(folder, ignore_errors=True)
        LOGGER.info("results: %s", as_typed(path))
        if error is not None:
            self._say_how_to_go_on(path, "the run failed" if isinstance(error, Exception) else "stopped")

    def _draw(self, path: Path, counts: Mapping[int, tuple[int, ...]]) -> None:
        """Draw the pictures for which the run has numbers."""
        if not (self.records and self.config.pictures):
            return
        if problem := extras.lacking("a run that is to end with pictures", "matplotlib"):
            LOGGER.warning("there are no pictures: %s", problem)
            return
        from fl_bn.app.pictures import course, labels  # matplotlib takes a second, for which no round waits

        pictures = [course(self.config, self.records, self.task)] if self.config.rounds else []
        pictures += [labels(counts, self.config)] if counts and all(counts.values()) else []
        for picture in pictures:
            durable.write(path / f"{picture.name}.png", picture.png, mode=0o666)

    def _say_how_to_go_on(self, path: Path, what: str) -> None:
        last = max(self._checkpoints.rounds(), default=0) if self._checkpoints else 0
        server = os.environ.get(SERVER, "")
        run = f"{shlex.quote(server)} {path.name}" if server else as_typed(path)
        advice = f"Go on from round {last}: fl-bn resume {run}" if last else "It cannot go on: it has no checkpoint (checkpoint-every)"
        LOGGER.info("%s after round %s of %s. %s", what, len(self.records), self.config.rounds, advice)

    def _add_passes(self) -> None:
        if self._history is not None and self.transport is not None and (passes := self.transport.statistics.outcomes):
            self._history.add_passes(passes)

    def _save_model(self, path: Path, transport: GridTransport) -> None:
        """Save the shared model as it was evaluated last, without the tensors that stay at the clients.

        Names are the unconverted network's or, if the method replaces BatchNorm
        (gn, ln, FedWon, ...), the converted one's.
        """
        metadata = {"method": self.config.method, "model": self.config.model, "rounds": str(min(len(self.records), self.config.rounds))}
        plain = plain_names(transport.shared.model)
        unseen = {plain[name]: tensor for name, tensor in transport.evaluations.unseen.items()}
        for name, tensors in (("model", transport.running.arrays()), ("unseen-client", unseen)):
            if tensors or name == "model":
                durable.save_network(path / f"{name}.safetensors", tensors, metadata)


def as_typed(path: Path) -> str:
    """Return a path to paste into a shell, relative if it is inside the current folder."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _locked(path: Path) -> IO[str]:
    """Lock the folder of a run against other processes, or raise ``RunFailed``."""
    try:
        return durable.take(path / LOCK, lambda: LOGGER.warning("%s cannot be locked: let no second process continue the run", path))
    except BlockingIOError as error:
        raise RunFailed(f"{path} is still being written by another process: end that process first, or wait for its end") from error


def environment() -> dict[str, Any]:
    """Return the content of every run's ``environment.json``."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "packages": {name: extras.version_of(name) for name in PACKAGES},
        "commit": commit(),
    }
