"""Run the cells of a sweep, several at a time.

A *cell* is one run of a sweep. Finished cells are not repeated, and the errors of
failed cells are reported. Worker processes end with their parent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fl_bn.app.checkpoints import FOLDER, rounds_done
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.former import read_config, renewed
from fl_bn.app.history import LINES, read_rows
from fl_bn.app.report.cells import CENTRALISED, OUTCOME, read_outcome
from fl_bn.app.summary import ended
from fl_bn.federation.engines.workers import cores, end_with
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.flower.compat import LOGGER
from fl_bn.options import Value
from fl_bn.support import durable

PROGRESS = 0.5  # seconds between two looks at the files of the running cells
ROUNDS_OTHERWISE = {"memory-format", "deterministic", "device", "engine", "threads"}
"""Run-config keys that change only last digits, in which compared runs may differ."""
OWN = {"output", "name", "pictures", "resume", "workers", "callbacks"}  # keys that a sweep sets itself, or that do not change results


class Elsewhere(RunFailed):
    """Signal that another process runs a cell, here or on a machine that shares the disk."""


@dataclass(frozen=True)
class Cell:
    """Describe one run of a sweep.

    Attributes:
        config: The run config.
        axes: The value of the run on each axis of the sweep.
        centralised: Whether one model is trained on the data of all clients
            together.
    """

    config: RunConfig
    axes: Mapping[str, Value] = field(default_factory=dict)
    centralised: bool = False

    @property
    def path(self) -> Path:
        """Return the folder of the run."""
        return Path(self.config.output) / self.config.name

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``rounds.jsonl``, one per round, but an incomplete last line."""
        return read_rows(self.path / LINES)[0]

    def ran(self) -> dict[str, Any]:
        """Return the run config, with all keys, of the run in the folder, if one was begun."""
        return _config(self.path)

    def finished(self) -> bool:
        """Return whether the folder has a finished run of this cell, on any device and engine.

        If it holds a run with another run config, ``ConfigError`` is raised.
        """
        keys, outcome = self.ran(), self.outcome()
        if not keys:
            return False
        there = {**keys, CENTRALISED: outcome.get(CENTRALISED, self.centralised)}
        here = {**self.config.to_mapping(), CENTRALISED: self.centralised}
        free = OWN | ROUNDS_OTHERWISE | self.config.without_effect
        deciding = [k for k in {**there, **here} if k not in free]
        if differing := [f"{k} is {there.get(k)!r} there, {here.get(k)!r} here" for k in deciding if there.get(k) != here.get(k)]:
            raise ConfigError(f"{self.path} holds another run ({'; '.join(differing)}): give another output folder, or remove {self.path}")
        whole = self.config.rounds in (0, len(self.rows()))  # 0: a re-calibration, which has as many rows as it made passes
        return whole and (outcome.get("status") == "finished" or ended(self.path / "summary.md"))  # fl-bn resume writes no outcome

    def outcome(self) -> dict[str, Any]:
        """Return the content of ``cell.json``, if the run has ended and it can be read."""
        return read_outcome(self.path)

    def write_outcome(self, status: str, seconds: float, error: str = "") -> None:
        """Write ``cell.json``, which says how the run ended, and if it failed with which ``error``."""
        self.path.mkdir(parents=True, exist_ok=True)
        about = {"axes": dict(self.axes), "config": self.config.to_mapping(), "centralised": self.centralised}
        text = json.dumps({**about, "status": status, "seconds": round(seconds, 2), "error": error}, indent=1) + "\n"
        durable.write(self.path / OUTCOME, text.encode(), mode=0o666)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the cell, also on other machines that share the disk, or raise ``Elsewhere``.

        The file of the lock is beside the run's folder, since that folder may be
        deleted meanwhile.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.parent / f".{self.path.name}.lock"
        try:
            lock = durable.take(file)  # returns without a lock on a disk that has none; the run warns of that
        except BlockingIOError as error:
            raise Elsewhere(f"another process runs {self.path}: wait for its end, and give the same command again") from error
        try:
            yield
        finally:
            durable.release(lock, file)


def trained_as(method: str) -> tuple[str, bool]:
    """Split a method's name in a sweep into the run-config key ``method`` and whether the run is centralised.

    >>> trained_as("gn"), trained_as("centralised"), trained_as("centralised-gn")
    (('gn', False), ('fedavg', True), ('gn', True))
    """
    if method == CENTRALISED:
        return "fedavg", True
    return method.removeprefix(f"{CENTRALISED}-"), method.startswith(f"{CENTRALISED}-")


def run_cell(cell: Cell) -> None:
    """Lock a cell and run it, unless it is finished. Worker processes call this function."""
    with cell.held():
        if not cell.finished():
            _run(cell)


def _run(cell: Cell) -> None:
    from fl_bn.app.assembly import client_samples
    from fl_bn.app.centralised import run_centralised

    begin, config = time.monotonic(), cell.config.to_mapping()
    begun = cell.ran() and cell.outcome().get("status") != "failed" and any(cell.path.glob(f"{FOLDER}/round-*"))
    if begun and not cell.centralised:
        config["resume"] = cell.config.name
    else:
        shutil.rmtree(cell.path, ignore_errors=True)
    handler, before = logging.FileHandler(cell.path.with_name(f"{cell.path.name}.log"), mode="w"), LOGGER.handlers
    LOGGER.handlers = [handler]
    try:
        if cell.centralised:
            run_centralised(cell.config)
        else:
            run_in_process(config)
    except Exception as error:
        cell.write_outcome("failed", time.monotonic() - begin, f"{type(error).__name__}: {error}")
        raise
    finally:
        LOGGER.handlers = before
        handler.close()
        client_samples.cache_clear()
    cell.write_outcome("finished", time.monotonic() - begin)


def run_cells(cells: Sequence[Cell], jobs: int, progress: Callable[[int, int], None]) -> dict[str, str]:
    """Run the unfinished cells in worker processes. Return the errors of failed ones, by name.

    If a worker dies, the others are run one at a time, to find the cell whose
    worker dies.

    Args:
        cells: The cells.
        jobs: The number of cells at a time; 0: one per core, fewer if a cell asks
            for worker processes.
        progress: Called about twice a second with the number of finished rounds and
            of all rounds.
    """
    waiting = [cell for cell in cells if not cell.finished()]
    workers = max((cell.config.workers or 1 for cell in waiting), default=1)
    jobs = max(1, min(jobs or cores(), len(waiting), cores() // workers if workers > 1 else len(waiting)))
    if jobs > 1:  # the runs share the cores: none of them starts workers unasked
        waiting = [replace(cell, config=replace(cell.config, workers=cell.config.workers or 1)) for cell in waiting]
    total = sum(cell.config.rounds for cell in cells)
    errors: dict[str, str] = {}
    while waiting:
        lost = _run_batch(waiting, jobs, errors, lambda: progress(sum(rounds_done(cell.path) for cell in cells), total))
        if lost and jobs == 1:
            errors[lost[0].config.name] = "its process died (killed, or out of memory)"
            lost[0].write_outcome("failed", 0.0, errors[lost[0].config.name])
            lost = lost[1:]
        waiting, jobs = lost, 1
    return errors


def _run_batch(batch: Sequence[Cell], jobs: int, errors: dict[str, str], show: Callable[[], None]) -> list[Cell]:
    """Run cells in worker processes until all have ended, or a worker has died.

    Return those that have not ended. ``errors`` gets the errors of cells that fail,
    by name.
    """
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with, initargs=(os.getpid(),))
    try:
        futures = {pool.submit(run_cell, cell): cell for cell in batch}
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=PROGRESS, return_when=FIRST_COMPLETED)
            show()
    except BaseException:  # Ctrl-C: end the runs without waiting for them
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
    failed = {future: future.exception() for future in futures}
    for future, error in failed.items():
        if error is not None and not isinstance(error, Elsewhere | BrokenProcessPool):
            errors[futures[future].config.name] = f"{type(error).__name__}: {error}"
    return [cell for future, cell in futures.items() if isinstance(failed[future], BrokenProcessPool)]


def _config(run: Path) -> dict[str, Any]:
    """Return the run config in a run's folder, with defaults for keys that it lacks, if readable.

    One of an earlier version with a value that no run has any more raises
    ``ConfigError``.
    """
    try:
        keys = read_config(run)
    except ConfigError:
        return {}
    try:
        own = renewed(keys)
        return {**RunConfig.from_mapping({"setup": own.get("setup", "")}).to_mapping(), **own} if keys else {}
    except ConfigError as error:
        raise ConfigError(f"{run} holds another run: {error}") from error
