"""Many runs, several at a time: what is finished is not repeated, what fails is reported, and nobody outlives the parent."""

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
from fl_bn.flower.log import LOGGER
from fl_bn.options import Value
from fl_bn.run.checkpoints import CONFIG, FOLDER
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.history import read_rows
from fl_bn.support import durable, locks

CENTRALISED = "centralised"  # a method's name here, alone or before that of a normaliser: training on the union of the data
OUTCOME = "cell.json"
PROGRESS = 0.5  # seconds between looks at the workers' files
ROUNDS_OTHERWISE = {"memory-format", "deterministic", "device", "engine", "threads"}
"""Keys that change last digits: results with either stand beside each other."""
OWN = {"output", "name", "pictures", "resume", "workers", "callbacks"}  # keys that the cell decides for itself, and two that change no bit


@dataclass(frozen=True)
class Cell:
    """Hold one run among many.

    Attributes:
        config: its run config.
        axes: where it stands, for tables.
        centralised: whether it is trained on the union of the data.
    """

    config: RunConfig
    axes: Mapping[str, Value] = field(default_factory=dict)
    centralised: bool = False

    @property
    def path(self) -> Path:
        """Return the run's folder."""
        return Path(self.config.output) / self.config.name

    def rows(self) -> list[dict[str, Any]]:
        """Return the rounds written so far, without one that a crash has torn."""
        return read_rows(self.path / "rounds.jsonl")[0]

    def rounds_done(self) -> int:
        """Return the number of rounds written so far."""
        file = self.path / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def ran(self) -> dict[str, Any]:
        """Return the run config in its folder, every key of it; empty where no run was begun."""
        return _config(self.path / CONFIG)

    def finished(self) -> bool:
        """Tell whether this cell has run to its end in this folder before, on whatever device and engine.

        Raises:
            ConfigError: the folder holds a run with another config, which is not to be lost.
        """
        keys, outcome = self.ran(), self.outcome()
        if not keys:
            return False
        there = {**keys, CENTRALISED: outcome.get(CENTRALISED, self.centralised)}
        here = {**self.config.to_mapping(), CENTRALISED: self.centralised}
        free = OWN | ROUNDS_OTHERWISE | self.config.without_effect
        deciding = [k for k in {**there, **here} if k not in free]
        if differing := [f"{k} is {there.get(k)!r} there, {here.get(k)!r} here" for k in deciding if there.get(k) != here.get(k)]:
            raise ConfigError(f"{self.path} holds another run ({'; '.join(differing)}): give another output folder, or remove it")
        if outcome.get("status") != "finished":
            return False
        return self.config.rounds == 0 or len(self.rows()) == self.config.rounds  # re-calibration: as many passes as it took

    def outcome(self) -> dict[str, Any]:
        """Return the contents of cell.json; empty where the run never ended."""
        try:
            outcome: dict[str, Any] = json.loads((self.path / OUTCOME).read_text())
        except (OSError, ValueError):
            return {}
        return outcome

    def write_outcome(self, status: str, seconds: float, error: str = "") -> None:
        """Write cell.json.

        Args:
            status: ``finished`` or ``failed``.
            seconds: of the run.
            error: why it failed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        about = {"axes": dict(self.axes), "config": self.config.to_mapping(), "centralised": self.centralised}
        text = json.dumps({**about, "status": status, "seconds": round(seconds, 2), "error": error}, indent=1) + "\n"
        durable.write(self.path / OUTCOME, text.encode(), mode=0o666)

    def remove_failed(self) -> None:
        """Remove its folder, with checkpoints, if it failed; unless another process runs it."""
        with suppress(RunFailed), self.held():
            if self.outcome().get("status") == "failed":
                shutil.rmtree(self.path)

    @contextmanager
    def held(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the cell against other processes, also those of other machines that share the disk, for ``patience`` seconds at first.

        The lock lies beside the folder, which may be removed meanwhile.

        Raises:
            RunFailed: another process runs it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file, end = self.path.parent / f".{self.path.name}.lock", time.monotonic() + patience
        while True:
            try:
                lock = locks.take(file)  # on a disk without locks the run itself warns
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise RunFailed(f"another process runs {self.path}: give the same command again when that has ended") from error
                time.sleep(PROGRESS)
        try:
            yield
        finally:
            locks.release(lock, file)


def trained_as(method: str) -> tuple[str, bool]:
    """Return what the run config's ``method`` is where a sweep or a comparison names ``method``, and whether the run is centralised.

    >>> trained_as("gn"), trained_as("centralised"), trained_as("centralised-gn")
    (('gn', False), ('fedavg', True), ('gn', True))
    """
    if method == CENTRALISED:
        return "fedavg", True
    return method.removeprefix(f"{CENTRALISED}-"), method.startswith(f"{CENTRALISED}-")


def log_of(path: Path) -> Path:
    """Return the log of the run in the folder ``path``, which lies beside it."""
    return path.parent / f"{path.name}.log"


def run_cell(cell: Cell) -> None:
    """Run the cell under its lock, so that no other process runs it meanwhile. A worker process calls this.

    Raises:
        RunFailed: Another process runs the cell already. That says nothing about the cell itself.
    """
    with cell.held():
        run_held(cell)


def run_held(cell: Cell) -> None:
    """Run the cell, its log in ``<name>.log`` beside its folder. What another process has finished meanwhile is left as it is.

    An interrupted run of the same cell goes on from its last checkpoint, where it has one, and is begun anew where it has none.

    Raises:
        ConfigError: the folder holds another run by now.
    """
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


def run_cells(
    cells: Sequence[Cell],
    jobs: int,
    progress: Callable[[int, int], None],
    running: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> dict[str, str]:
    """Run the cells that are not finished.

    A worker that dies (for want of memory, say) fails the cell that it was at, and only that. The workers end with this process,
    however it ends.

    Args:
        cells: finished ones may be among them.
        jobs: runs at a time; 0: one per core.
        progress: takes rounds done and rounds in all; called about twice a second.
        running: takes the cells that run; called about twice a second.

    Returns:
        The error of each cell that failed, by folder name.
    """
    todo = [cell for cell in cells if not cell.finished()]
    jobs = at_a_time(min(jobs or cores(), len(todo)), todo)
    if jobs > 1:  # the runs share the cores: none of them starts workers unasked
        todo = [replace(cell, config=replace(cell.config, workers=cell.config.workers or 1)) for cell in todo]
    total = sum(cell.config.rounds for cell in cells)
    finished = total - sum(cell.config.rounds for cell in todo)
    errors: dict[str, str] = {}
    waiting, suspects = list(todo), list[Cell]()  # suspects: were running when a worker died; tried again one at a time
    while waiting or suspects:
        alone = not waiting
        batch, waiting = ([suspects.pop()], []) if alone else (waiting, [])
        pool = ProcessPoolExecutor(1 if alone else jobs, mp_context=get_context("spawn"), initializer=_end_with_parent)
        try:
            futures: dict[Future[None], Cell] = {pool.submit(run_cell, cell): cell for cell in batch}
            pending, unknown = set(futures), set[str]()
            while pending:
                done, pending = wait(pending, timeout=PROGRESS, return_when=FIRST_COMPLETED)
                for future in done:
                    cell, error = futures[future], future.exception()
                    if isinstance(error, BrokenProcessPool) and not alone:
                        unknown.add(cell.config.name)
                        continue
                    finished += cell.rounds_done()
                    if isinstance(error, BrokenProcessPool):
                        errors[cell.config.name] = "its process died (killed, or out of memory)"
                        cell.write_outcome("failed", 0.0, errors[cell.config.name])
                    elif error is not None:
                        errors[cell.config.name] = f"{type(error).__name__}: {error}"
                now = [futures[future] for future in pending if future.running()]
                progress(finished + sum(cell.rounds_done() for cell in now), total)
                running([cell for cell in now if cell.path.exists()])
        except BaseException:  # Ctrl-C: what runs is not waited for
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown()
        left = [cell for cell in batch if cell.config.name in unknown]
        suspects, waiting = suspects + left[: jobs + 1], waiting + left[jobs + 1 :]  # they are begun in this order, one ahead of its worker
    return errors


def at_a_time(jobs: int, cells: Sequence[Cell]) -> int:
    """Return ``jobs``, or fewer where cells ask for workers of their own: together no more processes than cores."""
    workers = max((cell.config.workers or 1 for cell in cells), default=1)
    return jobs if workers == 1 else max(1, min(jobs, cores() // workers))


def _config(file: Path) -> dict[str, Any]:
    """Read a run config, with defaults for keys that only a newer version knows; empty without a whole file."""
    try:
        keys = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {**RunConfig().to_mapping(), **keys} if keys else {}


def _end_with_parent() -> None:
    """Leave Ctrl-C to the parent process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
