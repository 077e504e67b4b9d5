"""Compute the clients of a federation in worker processes."""

from __future__ import annotations

import io
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from joblib.externals.loky.backend.reduction import dumps
from torch import Tensor

from fl_bn.federation.client_round import Result
from fl_bn.federation.engines.clients import Clients
from fl_bn.federation.engines.workers import Workers
from fl_bn.federation.local import generators
from fl_bn.federation.payload import to_numpy, to_tensors
from fl_bn.federation.values import ClientState, Instruction, Reply

Value = TypeVar("Value", Instruction, ClientState, Reply)


MOST_BYTES = 2**30
"""The largest size of all clients' data, in bytes, for which processes start by themselves. Each process gets a copy."""


OURS = {"torch", "fl_bn", "numpy", "joblib", "cloudpickle"}
"""The packages, beside Python's own, whose classes and functions are the same in a worker process."""


class CannotMove(ValueError):
    """Report what cannot be moved to a worker process."""


class _Named(pickle.Unpickler):
    """Read a pickle, and collect the packages of classes and functions in it that are the user's own."""

    def __init__(self, written: bytes) -> None:
        super().__init__(io.BytesIO(written))
        self.own = set[str]()

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or a function that the pickle names. A class that cloudpickle writes out is of ``__main__``."""
        package = "__main__" if name == "_make_skeleton_class" else module.partition(".")[0]
        if package not in OURS and package not in sys.stdlib_module_names:
            self.own.add(package)
        return super().find_class(module, name)


def why_stay(clients: Clients) -> str:
    """Return why the clients stay in this process where nobody has asked for worker processes; empty if they may move.

    Processes that start by themselves must go on as this one does. So tasks, loaders and functions must be torch's, fl-bn's or lambdas,
    which cloudpickle writes with the variables that they read. The data must not exceed ``MOST_BYTES``, as each process gets a copy.
    """
    parts = _pickled([[own.loader, own.test, own.task, own.make_optimizer, own.make_scheduler] for own in clients.own] + [clients.schedule])
    if len(parts) > MOST_BYTES:
        return f"the data have {len(parts) / 2**30:.3g} GiB"
    (named := _Named(parts)).load()
    return f"a loader, task or function is from {min(named.own)}, and a worker process would have another one" if named.own else ""


def _pickled(one: Any) -> bytes:
    """Pickle ``one`` by joblib's cloudpickle.

    Raises:
        CannotMove: A part cannot be pickled.
    """
    try:
        return bytes(dumps(one))
    except Exception as error:  # whatever an object of the user's own raises
        raise CannotMove(
            f"the clients cannot be moved to worker processes, which need copies of network, data, task and functions "
            f"({type(error).__name__}: {error}): take workers=1, or make this object where it is used"
        ) from error


class InWorkers:
    """Compute clients in worker processes. All clients are pickled to a file in ``folder``. Each worker reads this file once.

    If a task or a function has changed before a round, or a variable that it holds, the file is written again. Changes of the data do
    not reach the workers.

    Raises:
        CannotMove: A part of the clients cannot be pickled, not even by joblib's cloudpickle.
    """

    def __init__(self, clients: Clients, workers: Workers, folder: Path) -> None:
        self._clients, self._workers, self._folder, self._versions = clients, workers, folder, 0
        self._checked: Instruction | None = None
        self._write()

    def _write(self) -> None:
        """Write all clients to a file of a new name, so that every worker reads it."""
        self._versions += 1
        self._path = self._folder / f"clients-{self._versions}"
        self._path.write_bytes(_pickled(self._clients))
        self._written = self._functions()

    def _functions(self) -> bytes:
        """Return a value that differs once a task or a function has changed in place."""
        every = [(own.task, own.make_optimizer, own.make_scheduler) for own in self._clients.own]
        return _pickled([*{id(one): one for own in every for one in own}.values(), self._clients.schedule])

    def work(self, instruction: Instruction, rounds: int, clients: Sequence[int], kept: Sequence[ClientState]) -> list[Result]:
        """Compute the rounds of several clients.

        Args:
            instruction: The instruction to all clients.
            rounds: The number of rounds of the run.
            clients: The clients' numbers.
            kept: The state that each client keeps, in the order of ``clients``.

        Returns:
            Each client's reply and new state, in order.

        Raises:
            Exception: The error of the first client that failed.
        """
        if instruction is not self._checked and self._functions() != self._written:
            self._path.unlink()
            self._write()
        self._checked = instruction
        packed, same = _packed(instruction), (torch.get_num_threads(), torch.get_default_dtype())
        states = [[one.get_state().numpy() for one in generators(self._clients.own[client].loader)] for client in clients]
        tasks = [(str(self._path), same, packed, rounds, *one) for one in zip(clients, map(_packed, kept), states, strict=True)]
        results = []
        for client, done in zip(clients, list(self._workers.run(_work, tasks)), strict=True):
            if done.error is not None:
                raise done.error
            reply, keeps, after = done.value
            for one, state in zip(generators(self._clients.own[client].loader), after, strict=True):
                one.set_state(torch.from_numpy(state))
            results.append((_unpacked(reply), _unpacked(keeps)))
        return results


@contextmanager
def in_workers(clients: Clients, count: int, asked: bool = True) -> Iterator[InWorkers]:
    """Yield ``InWorkers`` with ``count`` processes for the ``with`` block, see ``Workers``.

    Args:
        clients: The clients.
        count: The number of processes.
        asked: Whether the user asked for worker processes. If not, ``why_stay`` decides.

    Raises:
        CannotMove: The clients cannot be moved, or should not.
    """
    loaders = [loader for own in clients.own for loader in (own.loader, own.test if own.settings.local_evaluation else None)]
    if number := max(getattr(loader, "num_workers", 0) for loader in loaders):
        raise CannotMove(f"worker processes cannot start those of a DataLoader with num_workers={number}: give num_workers=0, or workers=1")
    if not asked and (why := why_stay(clients)):
        raise CannotMove(why)
    workers = Workers(count)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
            yield InWorkers(clients, workers, Path(folder))
    finally:
        workers.close()


def _work(
    path: str, same: tuple[int, torch.dtype], packed: Instruction, rounds: int, client: int, kept: ClientState, states: Sequence[Any]
) -> Any:
    """Compute one client's round in a worker process.

    The worker uses as many threads as its parent, since another number of threads would change the order of sums.

    Args:
        path: The file with all clients.
        same: The number of threads and the default dtype of the parent process.
        packed: The instruction, with NumPy arrays.
        rounds: The number of rounds of the run.
        client: The client's number.
        kept: The state that the client keeps, with NumPy arrays.
        states: The states of the generators of the client's loader.

    Returns:
        The reply and the new state, both with NumPy arrays, and the new states of the generators.
    """
    threads, dtype = same
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    clients = _read(path)
    for one, state in zip(own := generators(clients.own[client].loader), states, strict=True):
        one.set_state(torch.from_numpy(state.copy()))
    with clients.given_unused():
        reply, keeps = clients.compute(_unpacked(packed), rounds, client, _unpacked(kept))
    return _packed(reply), _packed(keeps), [one.get_state().numpy() for one in own]


@lru_cache(maxsize=1)
def _read(path: str) -> Clients:
    clients: Clients
    clients = pickle.loads(Path(path).read_bytes())
    return clients


def _packed(value: Value) -> Value:
    """Return ``value`` with NumPy arrays in place of tensors, since joblib passes large arrays through shared memory."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
