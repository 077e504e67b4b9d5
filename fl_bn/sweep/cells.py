"""Run the cells of a sweep, several at a time.

A *cell* is one run of a sweep. Finished cells are not repeated, and the errors of failed cells are reported. All worker
processes end with the process that started them.
"""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fl_bn.federation.engines.workers import cores
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.flower.compat import LOGGER
from fl_bn.options import Value
from fl_bn.run.checkpoints import CONFIG, FOLDER
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.former import renewed
from fl_bn.run.history import read_rows
from fl_bn.support import durable, locks
from fl_bn.support.gpu import mps_runs, on_gpu

CENTRALISED = "centralised"  # in a sweep, the name of training on all clients' data; also as centralised-METHOD
OUTCOME = "cell.json"
PROGRESS = 0.5  # seconds between two looks at the files of the running cells
ROUNDS_OTHERWISE = {"memory-format", "deterministic", "device", "engine", "threads"}
"""Run-config keys that change only the last digits of numbers. Runs that differ in these keys may be compared."""
OWN = {"output", "name", "pictures", "resume", "workers", "callbacks"}  # keys that a sweep sets itself, or that do not change results


class Elsewhere(RunFailed):
    """Signal that another process runs a cell, here or on another machine that shares the disk."""


@dataclass(frozen=True)
class Cell:
    """Describe one run of a sweep.

    Attributes:
        config: The run config.
        axes: The value of the run on each axis of the sweep, for tables.
        centralised: Whether one model is trained on the data of all clients together, without federation.
    """

    config: RunConfig
    axes: Mapping[str, Value] = field(default_factory=dict)
    centralised: bool = False

    @property
    def path(self) -> Path:
        """Return the folder of the run."""
        return Path(self.config.output) / self.config.name

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``rounds.jsonl``, one per round; an incomplete last line is left out."""
        return read_rows(self.path / "rounds.jsonl")[0]

    def rounds_done(self) -> int:
        """Return how many rounds ``rounds.jsonl`` has."""
        file = self.path / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def ran(self) -> dict[str, Any]:
        """Return the run config with which the run in the folder was begun, with all keys; empty: no run was begun."""
        return _config(self.path / CONFIG)

    def finished(self) -> bool:
        """Return whether the folder has a finished run of this cell, on any device and engine.

        Raises:
            ConfigError: The folder holds a run with another run config. That run must not be overwritten.
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
        if outcome.get("status") != "finished":
            return False
        return (
            self.config.rounds == 0 or len(self.rows()) == self.config.rounds
        )  # rounds = 0: a re-calibration, which has as many rows as it made passes

    def outcome(self) -> dict[str, Any]:
        """Return the content of ``cell.json``; empty: the run has not ended, or the file cannot be read."""
        try:
            outcome: dict[str, Any] = json.loads((self.path / OUTCOME).read_text())
        except (OSError, ValueError):
            return {}
        return outcome

    def write_outcome(self, status: str, seconds: float, error: str = "") -> None:
        """Write ``cell.json``, which says how the run ended.

        Args:
            status: ``finished`` or ``failed``.
            seconds: How long the run took.
            error: Why the run failed; empty: it did not fail.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        about = {"axes": dict(self.axes), "config": self.config.to_mapping(), "centralised": self.centralised}
        text = json.dumps({**about, "status": status, "seconds": round(seconds, 2), "error": error}, indent=1) + "\n"
        durable.write(self.path / OUTCOME, text.encode(), mode=0o666)

    def remove_failed(self) -> None:
        """Delete the folder of the run, with its checkpoints, if the run failed and no other process runs it again."""
        with suppress(Elsewhere), self.held():
            if self.outcome().get("status") == "failed":
                shutil.rmtree(self.path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the cell, so that no other process runs it, not even on another machine that shares the disk.

        The file of the lock is beside the run's folder, since that folder may be deleted meanwhile.

        Raises:
            Elsewhere: Another process still runs the cell.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.parent / f".{self.path.name}.lock"
        try:
            lock = locks.take(file)  # returns without a lock on a disk that has none; the run warns of that
        except BlockingIOError as error:
            raise Elsewhere(f"another process runs {self.path}: wait for its end, and give the same command again") from error
        try:
            yield
        finally:
            locks.release(lock, file)


def trained_as(method: str) -> tuple[str, bool]:
    """Split a method's name in a sweep into the run-config key ``method`` and whether the run is centralised.

    >>> trained_as("gn"), trained_as("centralised"), trained_as("centralised-gn")
    (('gn', False), ('fedavg', True), ('gn', True))
    """
    if method == CENTRALISED:
        return "fedavg", True
    return method.removeprefix(f"{CENTRALISED}-"), method.startswith(f"{CENTRALISED}-")


def log_of(path: Path) -> Path:
    """Return the log file of the run in the folder ``path``. The file is beside the folder."""
    return path.parent / f"{path.name}.log"


def run_cell(cell: Cell) -> None:
    """Lock a cell and run it, unless it is finished. Worker processes call this function. The log goes to ``log_of(cell.path)``.

    An interrupted run of the same cell is resumed from its last checkpoint. It is begun anew if it has no checkpoint, or is
    centralised.

    Raises:
        Elsewhere: Another process runs the cell already. In this case the cell is not marked as failed.
        ConfigError: The folder holds another run.
        Exception: The run failed with this error. The error is also written to ``cell.json``.
    """
    with cell.held():
        _run(cell)


def _run(cell: Cell) -> None:
    from fl_bn.run.centralised import run_centralised

    if cell.finished():
        return
    begin, config = time.monotonic(), cell.config.to_mapping()
    if not cell.centralised and cell.ran() and any(cell.path.glob(f"{FOLDER}/round-*")):
        config["resume"] = cell.config.name
    else:
        shutil.rmtree(cell.path, ignore_errors=True)
    handler, before = logging.FileHandler(log_of(cell.path), mode="w"), LOGGER.handlers
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
    cell.write_outcome("finished", time.monotonic() - begin)


def run_cells(cells: Sequence[Cell], jobs: int, progress: Callable[[int, int], None]) -> dict[str, str]:
    """Run the cells (runs of a sweep) that are not finished, in worker processes.

    If a worker process dies, for example for lack of memory, only the cell that it ran has failed. The worker
    processes end with this process, even if SIGKILL ends it. Cells that another process runs are left to it.

    Args:
        cells: The cells. Finished ones are left out.
        jobs: The number of runs at a time; 0: one per core.
        progress: Called about twice a second with the number of finished rounds and of all rounds.

    Returns:
        The error of each failed cell, by the name of its folder.
    """
    todo = [cell for cell in cells if not cell.finished()]
    jobs = at_a_time(min(jobs or cores(), len(todo)), todo)
    if jobs > 1:  # the runs share the cores: none of them starts workers unasked
        todo = [replace(cell, config=replace(cell.config, workers=cell.config.workers or 1)) for cell in todo]
        _warn_of_turns(jobs, todo)
    total = sum(cell.config.rounds for cell in cells)
    before = total - sum(cell.config.rounds for cell in todo)

    ended: list[int] = []  # the rounds of each cell that has ended
    errors: dict[str, str] = {}

    def show(running: Sequence[Cell]) -> None:
        progress(before + sum(ended) + sum(cell.rounds_done() for cell in running), total)

    waiting = list(todo)
    while waiting:
        lost = _run_batch(waiting, jobs, show, ended, errors)
        suspects, waiting = lost[: jobs + 1], lost[jobs + 1 :]  # the pool takes one cell more than it has workers
        for cell in suspects:  # each is run again alone, to find the one whose worker dies
            if _run_batch([cell], 1, show, ended, errors):
                errors[cell.config.name] = "its process died (killed, or out of memory)"
                cell.write_outcome("failed", 0.0, errors[cell.config.name])
    return errors


def _run_batch(
    batch: Sequence[Cell], jobs: int, show: Callable[[Sequence[Cell]], None], ended: list[int], errors: dict[str, str]
) -> list[Cell]:
    """Run cells in a pool of worker processes until all have ended, or a worker has died.

    Args:
        batch: The cells, in the order in which they begin.
        jobs: The number of worker processes.
        show: Called about twice a second with the cells that run.
        ended: Gets the number of rounds of each cell that has ended.
        errors: Gets the error of each cell that failed, by the name of its folder.

    Returns:
        The cells that have not ended, in the order of ``batch``, since a worker died.
    """
    lost: set[str] = set()
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_end_with_parent)
    try:
        futures: dict[Future[None], Cell] = {pool.submit(run_cell, cell): cell for cell in batch}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=PROGRESS, return_when=FIRST_COMPLETED)
            for future in done:
                cell, error = futures[future], future.exception()
                name = cell.config.name
                if isinstance(error, BrokenProcessPool):
                    lost.add(name)
                    continue
                ended.append(cell.rounds_done())
                if error is not None and not isinstance(error, Elsewhere):
                    errors[name] = f"{type(error).__name__}: {error}"
            show([futures[future] for future in pending if future.running()])
    except BaseException:  # Ctrl-C: end the runs without waiting for them
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
    return [cell for cell in batch if cell.config.name in lost]


def _warn_of_turns(jobs: int, cells: Sequence[Cell]) -> None:
    """Warn if several runs would share a GPU that, without NVIDIA's MPS, computes one of them at a time."""
    if any(on_gpu(cell.config.device) for cell in cells) and not mps_runs():
        LOGGER.warning(
            "%s runs at a time share a GPU, which computes one of them at a time. Start NVIDIA's MPS (nvidia-cuda-mps-control -d), with "
            "which they compute together; for small networks, --run-config \"device='cpu'\" is faster, too (docs/how-to/engines.md)",
            jobs,
        )


def at_a_time(jobs: int, cells: Sequence[Cell]) -> int:
    """Return how many cells (runs) to run at a time: ``jobs``, or fewer if a cell asks for several worker processes.

    With several workers per cell, all cells together have at most one process per core. A single cell may exceed this.
    """
    workers = max((cell.config.workers or 1 for cell in cells), default=1)
    return jobs if workers == 1 else max(1, min(jobs, cores() // workers))


def _config(file: Path) -> dict[str, Any]:
    """Read the run config in ``file``, with defaults for keys that it lacks; empty: there is no readable file.

    Raises:
        ConfigError: The file is of an earlier version of fl-bn, with a key that went and decided the run's results.
    """
    try:
        keys = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    try:
        own = renewed(keys)
        return {**RunConfig.from_mapping({"setup": own.get("setup", "")}).to_mapping(), **own} if keys else {}
    except ConfigError as error:
        raise ConfigError(f"{file.parent} holds another run: {error}") from error


def _end_with_parent() -> None:
    """Make this process ignore Ctrl-C, which the parent handles, and end when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
