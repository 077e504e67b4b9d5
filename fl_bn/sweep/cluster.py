"""Run the cells of a sweep on the nodes of a Ray cluster. Each cell is one Ray task, in one process of a node.

Every node needs fl-bn and the data at the same paths as this machine. The folder of the sweep may be on a disk that all nodes
share. If it is not, the task writes to the disk of its node, and sends the folder of the run back.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError

from fl_bn.flower import RunFailed
from fl_bn.flower.compat import LOGGER
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.sweep.cells import PROGRESS, Cell, log_of, run_held

LOG = "cluster.log"  # the file in the folder of the sweep that says which node ran which cell
PATIENCE = 120.0  # seconds to wait until a process on a lost node ends, and releases its lock on a shared disk
TRIES = 3  # how many processes or nodes may die while they run the same cell, before it counts as failed
DIED = f"its process died {TRIES} times (killed, out of memory, or with its node)"


@dataclass(frozen=True)
class Done:
    """Hold the result of a Ray task, which ran one cell.

    Attributes:
        error: Why the run failed; empty: it succeeded.
        folder: The files of the run as a tar archive; empty: the folder of the sweep is shared.
        node: The address of the node that ran the cell, and the first digits of its id.
    """

    error: str
    folder: bytes
    node: str


def run_cells(
    cells: Sequence[Cell],
    jobs: int,
    progress: Callable[[int, int], None],
    running: Callable[[Sequence[Cell]], None] = lambda cells: None,
    *,
    address: str = "",
    gpus: float = 0.0,
) -> dict[str, str]:
    """Run the cells (runs of a sweep) that are not finished on the nodes of a Ray cluster.

    A cell whose process or node is lost is run again by Ray: from its checkpoint if the folder is shared, else anew. After
    ``TRIES`` losses it has failed.

    Every run takes ``threads`` x ``workers`` CPUs of its node; ``workers=0`` counts as one. If the runs differ in these keys,
    every run takes as many CPUs as the largest one.

    Args:
        cells: The cells. Finished ones are left out.
        jobs: The most runs at a time; 0: as many as the CPUs and GPUs of the nodes allow.
        progress: Called about twice a second with the number of finished rounds and of all rounds. The rounds of
            running cells are known only if the folder is shared.
        running: Called about twice a second with the cells that run.
        address: The address of the cluster's head node, HOST:PORT; empty: the address in RAY_ADDRESS, else the running
            cluster of this machine, else a new cluster of this machine only.
        gpus: The share of a GPU that each run gets.

    Returns:
        The error of each failed cell, by the name of its folder.

    Raises:
        ConfigError: The cluster does not exist, or none of its nodes has the CPUs and GPUs that a run needs.
    """
    cells = [replace(cell, config=_there(cell.config)) for cell in cells]
    waiting = [cell for cell in cells if not cell.finished()]
    if not waiting:
        return {}
    total = sum(cell.config.rounds for cell in cells)
    finished = total - sum(cell.config.rounds for cell in waiting)
    cpus = max(cell.config.threads * max(1, cell.config.workers) for cell in waiting)
    tasks, errors = dict[Any, Cell](), dict[str, str]()
    with _connected(address, Path(waiting[0].config.output).parent) as shared:
        if not (room := _room(cpus, gpus)):
            raise ConfigError(
                f"a run needs {cpus} CPUs (threads x workers) and {gpus:g} of a GPU, but none of the {len(ray.nodes())} nodes of the "
                "cluster has them"
            )
        LOGGER.info("%d runs on %d nodes, %d at a time", len(waiting), len(ray.nodes()), min(room, jobs or room))
        run_on: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=TRIES - 1, scheduling_strategy="SPREAD")(on_node)
        while waiting or tasks:
            while waiting and len(tasks) < (jobs or _room(cpus, gpus)):
                cell = waiting.pop(0)
                tasks[run_on.remote(cell, str(shared))] = cell
            if not tasks:  # no node has room; lost nodes may come back
                time.sleep(PROGRESS)
            for future in ray.wait(list(tasks), num_returns=len(tasks), timeout=PROGRESS)[0] if tasks else ():
                cell = tasks.pop(future)
                if error := _taken(cell, future):
                    errors[cell.config.name] = error
                finished += cell.rounds_done()
            progress(finished + sum(cell.rounds_done() for cell in tasks.values()), total)
            running([*tasks.values()])
    return errors


def _room(cpus: int, gpus: float) -> int:
    """Return how many runs the living nodes have room for, each with ``cpus`` CPUs and ``gpus`` GPUs of one node."""
    has = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(one.get("CPU", 0) // cpus, one.get("GPU", 0) / gpus + 1e-9 if gpus else one.get("CPU", 0))) for one in has)


def _taken(cell: Cell, future: Any) -> str:
    """Store the result of a task that has ended, and return why its run failed; empty: it succeeded."""
    try:
        done: Done = ray.get(future)
    except RayError as error:
        cell.write_outcome("failed", 0.0, DIED)
        LOGGER.warning("%s: %s: %s", cell.config.name, DIED, type(error).__name__)
        return DIED
    if done.folder:
        unpack(done.folder, Path(cell.config.output))
    LOGGER.info("%s: %s on node %s", cell.config.name, "failed" if done.error else "finished", done.node)
    return done.error


def _there(config: RunConfig) -> RunConfig:
    """Return the run config with which any node can run the cell: ``output`` is an absolute path, and ``workers`` is at least 1."""
    return replace(config, output=str(Path(config.output).absolute()), workers=max(1, config.workers))


@contextmanager
def _connected(address: str, folder: Path) -> Iterator[Path]:
    """Connect to the cluster, and log to ``folder``, inside the ``with`` block.

    Yields:
        The path of a file in the folder. A node on which this file exists shares the folder.

    Raises:
        ConfigError: The cluster cannot be reached.
    """
    environment = {"PYTHONPATH": ":".join(sys.path)}  # the same import paths as here, so that the user's modules are found
    try:
        ray.init(address=address or None, runtime_env={"env_vars": environment}, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address or 'RAY_ADDRESS'}: {error}. Start a cluster (ray start --head), and give --ray-address"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder / f".shared-{uuid4().hex}"
    handler = logging.FileHandler(folder / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOGGER.addHandler(handler)
    try:
        shared.touch()
        yield shared
    finally:
        shared.unlink(missing_ok=True)
        LOGGER.removeHandler(handler)
        handler.close()
        ray.shutdown()  # ends the tasks that still run


def on_node(cell: Cell, shared: str) -> Done:
    """Run a cell (one run of a sweep) in a process of a node. Ray calls this function.

    Args:
        cell: The cell.
        shared: The path of a file that exists on this node if the node shares the folder of the sweep.
    """
    error, node = "", f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:6]}"  # type: ignore[no-untyped-call]
    try:
        with cell.held(PATIENCE):
            try:
                run_held(cell)
            except Exception as problem:  # noqa: BLE001 - an error in a cell must not end the sweep
                error = f"{type(problem).__name__}: {problem}"
            return _done(cell, shared, error, node)
    except RunFailed as busy:
        return Done(f"{type(busy).__name__}: {busy}", b"", node)


def _done(cell: Cell, shared: str, error: str, node: str) -> Done:
    """Return the result of a run, with its folder if this node does not share the folder of the sweep."""
    if Path(shared).exists():
        return Done(error, b"", node)
    folder = pack(cell.path)
    shutil.rmtree(cell.path, ignore_errors=True)
    log_of(cell.path).unlink(missing_ok=True)
    return Done(error, folder, node)


def pack(path: Path) -> bytes:
    """Return the folder and the log of a run as a tar archive."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for part in (path, log_of(path)):
            if part.exists():
                tar.add(part, arcname=part.name)
    return target.getvalue()


def unpack(folder: bytes, into: Path) -> None:
    """Unpack ``folder``, an archive that ``pack`` has made. The content is written to the folder ``into``."""
    with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
        tar.extractall(into, filter="data")
