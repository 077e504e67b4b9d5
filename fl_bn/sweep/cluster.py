"""Cells on the nodes of a Ray cluster: each is one task, which runs in one process of a node, as with ``--jobs`` here.

A node needs fl-bn and the data at the same paths, and may write to the sweep's folder: its own, or one that all nodes share. In the former
case the task sends the run's folder back.
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

LOG = "cluster.log"  # in the sweep's folder: which node ran what, and which were lost
PATIENCE = 120.0  # seconds in which a lost node's process ends, or its lock on a shared disk
TRIES = 2  # processes that one cell may cost
DIED = "its process died twice (killed, or out of memory)"


@dataclass(frozen=True)
class Node:
    """Name a living node: Ray's id, its name for people, and how many cells it takes at a time."""

    id: str
    name: str
    room: int


@dataclass(frozen=True)
class Done:
    """Hold the result of a task.

    Attributes:
        error: empty if the run succeeded.
        folder: the run's files as a tar; empty where the sweep's folder is shared.
    """

    error: str
    folder: bytes


@dataclass(frozen=True)
class Task:
    """Hold a cell that runs, its node, and when it began (seconds of ``time.monotonic``)."""

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
    """Run the cells that are not finished on the nodes of a Ray cluster.

    A cell whose node is lost is begun anew on another, or goes on from its checkpoint where the folder is shared. A process that dies on a
    living node costs its cell one of two tries.

    A run takes ``threads`` x ``workers`` CPUs of its node, one worker where the run config says 0.

    Args:
        cells: finished ones may be among them.
        jobs: runs at a time, at most; 0: as many as the nodes have CPUs, and ``gpus`` of a GPU for each.
        progress: as in ``cells.run_cells``. Rounds of a cell that runs count where the folder is shared.
        running: as in ``cells.run_cells``.
        address: of the cluster's head, HOST:PORT; empty: RAY_ADDRESS, the cluster of this machine, or a new one of this machine alone.
        gpus: each run's share of a GPU.

    Returns:
        The error of each cell that failed, by folder name.

    Raises:
        ConfigError: there is no such cluster, or none of its nodes has the CPUs and GPUs that a run needs.
    """
    cells = [replace(cell, config=_there(cell.config)) for cell in cells]
    waiting = [cell for cell in cells if not cell.finished()]
    if not waiting:
        return {}
    total = sum(cell.config.rounds for cell in cells)
    with _connected(address, Path(waiting[0].config.output).parent) as shared:
        return _Sweep(waiting, total, jobs, gpus, shared, address).run(progress, running)


def _there(config: RunConfig) -> RunConfig:
    """Return the config in a process of any node: paths from the root, and no more workers than Ray was asked for."""
    return replace(config, output=str(Path(config.output).absolute()), workers=max(1, config.workers))


@contextmanager
def _connected(address: str, folder: Path) -> Iterator[Path]:
    """Connect to the cluster and log to ``folder``; yield the file by which a task sees whether it shares that folder."""
    try:
        _connect(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address or 'RAY_ADDRESS'}: {error}. Start one (ray start --head), and give the address that it prints"
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
        ray.shutdown()  # ends what still runs


def _connect(address: str) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}  # as Flower does: modules next to the sweep are found by the same paths
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
        LOGGER.info("%d runs on %d nodes: %s", len(self.waiting), len(nodes), ", ".join(f"{node.name} ({node.room})" for node in nodes))
        while self.waiting or self.tasks:
            self.submit()
            if self.tasks:
                done, _ = ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=PROGRESS)
                for future in done:
                    self.take(future, self.tasks.pop(future))
                if self.cut_off():
                    self.connect_again()
            else:
                time.sleep(PROGRESS)  # no node has room: some may come back
            now = [task.cell for task in self.tasks.values()]
            progress(self.finished + sum(cell.rounds_done() for cell in now), self.total)
            running(now)
        return self.errors

    def cut_off(self) -> bool:
        """Tell whether this process's own node is lost: then Ray silently gives it no place on any other."""
        return not any(node["NodeID"] == self.own and node["Alive"] for node in ray.nodes())

    def connect_again(self) -> None:
        LOGGER.warning("the node that this command was connected to is lost: it connects to another, and what was running is begun again")
        self.waiting[:0] = [task.cell for task in self.tasks.values()]
        self.tasks.clear()
        ray.shutdown()
        _connect(self.address)
        self.own = ray.get_runtime_context().get_node_id()

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive, without those that lost a cell's process while Ray still counts them."""
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
        """Give every free place a cell, the emptiest node first."""
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
        """Enter the result of a task, or let its cell be begun anew."""
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
        LOGGER.warning("%s: its process was lost %s; it is begun again", name, why)
        self.waiting.insert(0, task.cell)


def _gone(node: Node, patience: float = 10.0) -> bool:
    """Tell whether Ray has given the node up, which may be some seconds after its processes died."""
    end = time.monotonic() + patience
    while any(one["NodeID"] == node.id and one["Alive"] for one in ray.nodes()):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def on_node(cell: Cell, shared: str) -> Done:
    """Run the cell, in a process of a node.

    Args:
        cell: to run.
        shared: a file that exists on this node if the sweep's folder is that of the command.
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
    except Exception as problem:  # noqa: BLE001 - it fails this cell alone
        error = f"{type(problem).__name__}: {problem}"
    if Path(shared).exists():
        return Done(error, b"")
    folder = pack(cell.path)
    shutil.rmtree(cell.path, ignore_errors=True)
    log_of(cell.path).unlink(missing_ok=True)
    return Done(error, folder)


def pack(path: Path) -> bytes:
    """Return a run's folder and its log, as a tar."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for part in (path, log_of(path)):
            if part.exists():
                tar.add(part, arcname=part.name)
    return target.getvalue()


def unpack(folder: bytes, into: Path) -> None:
    """Unpack the tar of ``pack``."""
    with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
        tar.extractall(into, filter="data")
