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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fl_bn.flower import RunFailed
from fl_bn.flower.log import LOGGER
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.sweep.cells import PROGRESS, Cell, log_of, run_held

LOG = "cluster.log"  # the file in the folder of the sweep that says which node ran which cell, and which nodes were lost
PATIENCE = 120.0  # seconds to wait until a process on a lost node ends, and releases its lock on a shared disk
TRIES = 2  # how many processes may die while they run the same cell, before it counts as failed
DIED = "its process died twice (killed, or out of memory)"


@dataclass(frozen=True)
class Node:
    """Describe a node of the cluster.

    Attributes:
        id: Ray's id of the node.
        name: The address of the node and the first digits of its id, for messages.
        room: How many cells the node can run at a time.
    """

    id: str
    name: str
    room: int


@dataclass(frozen=True)
class Done:
    """Hold the result of a Ray task, which ran one cell.

    Attributes:
        error: Why the run failed; empty: it succeeded.
        folder: The files of the run as a tar archive; empty: the folder of the sweep is shared.
    """

    error: str
    folder: bytes


@dataclass(frozen=True)
class Task:
    """Describe a running Ray task: its cell, its node, and the time at which it began, in seconds of ``time.monotonic``."""

    cell: Cell
    node: Node
    begun: float


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

    A cell whose node is lost is run on another node: from its checkpoint if the folder is shared, else anew. A cell
    whose process dies twice on living nodes has failed.

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
    with _connected(address, Path(waiting[0].config.output).parent) as shared:
        return _Sweep(waiting, total, jobs, gpus, shared, address).run(progress, running)


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
    try:
        _connect(address)
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


def _connect(address: str) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}  # the same import paths as here, so that the user's modules are found
    ray.init(address=address or None, runtime_env={"env_vars": environment}, log_to_driver=False, logging_level=logging.WARNING)


class _Sweep:
    def __init__(self, waiting: list[Cell], total: int, jobs: int, gpus: float, shared: Path, address: str) -> None:
        self.waiting, self.total, self.jobs, self.gpus, self.shared, self.address = waiting, total, jobs, gpus, shared, address
        self.own = ray.get_runtime_context().get_node_id()  # the node that this process is connected to
        self.finished = total - sum(cell.config.rounds for cell in waiting)
        self.cpus = max(cell.config.threads * max(1, cell.config.workers) for cell in waiting)
        self.tasks: dict[Any, Task] = {}
        self.deaths, self.errors = Counter[str](), dict[str, str]()
        self.lost: set[str] = set()  # ids of nodes
        self.run_on: Any = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0)(on_node)

    def run(self, progress: Callable[[int, int], None], running: Callable[[Sequence[Cell]], None]) -> dict[str, str]:
        nodes = self.nodes()
        if not any(node.room for node in nodes):
            raise ConfigError(
                f"a run needs {self.cpus} CPUs (threads x workers) and {self.gpus:g} of a GPU, but no node of the cluster has them: "
                f"{', '.join(node.name for node in nodes)}"
            )
        room = ", ".join(f"{node.name} ({node.room} at a time)" for node in nodes)
        LOGGER.info("%d runs on %d nodes: %s", len(self.waiting), len(nodes), room)
        while self.waiting or self.tasks:
            self.submit()
            if self.tasks:
                done, _ = ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=PROGRESS)
                for future in done:
                    self.take(future, self.tasks.pop(future))
                if self.cut_off():
                    self.connect_again()
            else:
                time.sleep(PROGRESS)  # no node has room; lost nodes may come back
            now = [task.cell for task in self.tasks.values()]
            progress(self.finished + sum(cell.rounds_done() for cell in now), self.total)
            running(now)
        return self.errors

    def cut_off(self) -> bool:
        """Return whether the node to which this process is connected is lost. Ray then starts no more tasks, without an error."""
        return not any(node["NodeID"] == self.own and node["Alive"] for node in ray.nodes())

    def connect_again(self) -> None:
        LOGGER.warning(
            "the node to which this command was connected is lost: the command connects to another node, and starts the running cells again"
        )
        self.waiting[:0] = [task.cell for task in self.tasks.values()]
        self.tasks.clear()
        ray.shutdown()
        _connect(self.address)
        self.own = ray.get_runtime_context().get_node_id()

    def nodes(self) -> list[Node]:
        """Return the living nodes. Nodes that were found lost are left out, even while Ray still lists them as alive."""
        nodes = []
        for node in ray.nodes():
            if node["Alive"] and node["NodeID"] not in self.lost:
                has = node["Resources"]
                room = int(has.get("CPU", 0) // self.cpus)
                if self.gpus:
                    room = min(room, int(has.get("GPU", 0) / self.gpus + 1e-9))
                nodes.append(Node(node["NodeID"], f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}", room))
        return nodes

    def submit(self) -> None:
        """Start waiting cells (runs) wherever nodes have room, on the node with the most room first."""
        taken = Counter(task.node.id for task in self.tasks.values())
        free = {node: node.room - taken[node.id] for node in self.nodes()}
        while self.waiting and free and (not self.jobs or len(self.tasks) < self.jobs):
            node = max(free, key=lambda node: free[node])
            if free[node] <= 0:
                return
            free[node] -= 1
            cell = self.waiting.pop(0)
            place = NodeAffinitySchedulingStrategy(node.id, soft=False)
            LOGGER.info("%s: begins on node %s", cell.config.name, node.name)
            self.tasks[self.run_on.options(scheduling_strategy=place).remote(cell, str(self.shared))] = Task(cell, node, time.monotonic())

    def take(self, future: Any, task: Task) -> None:
        """Store the result of a task that has ended. If its process died, the cell is run again, or has failed (see ``died``)."""
        name, seconds = task.cell.config.name, time.monotonic() - task.begun
        try:
            done: Done = ray.get(future)
        except RayError as error:
            self.died(task, error)
            return
        if done.folder:
            unpack(done.folder, Path(task.cell.config.output))
        if done.error:
            self.errors[name] = done.error
        self.finished += task.cell.rounds_done()
        LOGGER.info("%s: %s on node %s after %.1f s", name, "failed" if done.error else "finished", task.node.name, seconds)

    def died(self, task: Task, error: RayError) -> None:
        name, gone = task.cell.config.name, _gone(task.node)
        if gone:
            if task.node.id not in self.lost:
                self.lost.add(task.node.id)
                LOGGER.warning("node %s is lost; nodes left: %s", task.node.name, ", ".join(n.name for n in self.nodes()) or "none")
        elif not self.cut_off():
            self.deaths[name] += 1
        if self.deaths[name] >= TRIES:
            self.errors[name] = DIED
            task.cell.write_outcome("failed", 0.0, DIED)
            LOGGER.warning("%s: %s; last on node %s", name, DIED, task.node.name)
            return
        why = "with its node" if gone else f"on node {task.node.name} ({type(error).__name__})"
        LOGGER.warning("%s: its process was lost %s; the run is begun again", name, why)
        self.waiting.insert(0, task.cell)


def _gone(node: Node, patience: float = 10.0) -> bool:
    """Return whether Ray counts the node as lost. Ray may need some seconds after the processes of the node have died.

    Args:
        node: The node.
        patience: For how many seconds to wait until Ray counts the node as lost.
    """
    end = time.monotonic() + patience
    while any(one["NodeID"] == node.id and one["Alive"] for one in ray.nodes()):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def on_node(cell: Cell, shared: str) -> Done:
    """Run a cell (one run of a sweep) in a process of a node. Ray calls this function.

    Args:
        cell: The cell.
        shared: The path of a file that exists on this node if the node shares the folder of the sweep.
    """
    try:
        with cell.held(PATIENCE):
            return _done(cell, shared)
    except RunFailed as busy:
        return Done(f"{type(busy).__name__}: {busy}", b"")


def _done(cell: Cell, shared: str) -> Done:
    error = ""
    try:
        run_held(cell)
    except Exception as problem:  # noqa: BLE001 - an error in a cell must not end the sweep
        error = f"{type(problem).__name__}: {problem}"
    if Path(shared).exists():
        return Done(error, b"")
    folder = pack(cell.path)
    shutil.rmtree(cell.path, ignore_errors=True)
    log_of(cell.path).unlink(missing_ok=True)
    return Done(error, folder)


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
