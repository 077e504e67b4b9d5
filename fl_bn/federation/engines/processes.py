"""Compute the clients of a ``Federation`` in worker processes. Each process has a copy of network and data."""

from __future__ import annotations

import pickle
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


class CannotMove(ValueError):
    """Report what cannot be moved to a worker process."""


class InWorkers:
    """Compute clients in worker processes. All clients are pickled to the file ``path``, which each worker reads once.

    Tasks and functions are sent again for every round, so the workers see what the user's code changes in them. Changes of the data do
    not reach the workers.
    """

    def __init__(self, clients: Clients, workers: Workers, path: Path) -> None:
        self._clients, self._workers, self._path = clients, workers, path

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
        packed, same = _packed(instruction), (torch.get_num_threads(), torch.get_default_dtype())
        own = [generators(self._clients.own[client].loader) for client in clients]
        states = [[one.get_state().numpy() for one in of] for of in own]
        tasks = [
            (str(self._path), same, self._functions(client), packed, rounds, client, _packed(keeps), of)
            for client, keeps, of in zip(clients, kept, states, strict=True)
        ]
        results = []
        for of, done in zip(own, list(self._workers.run(_work, tasks)), strict=True):
            if done.error is not None:
                raise done.error
            reply, keeps, after = done.value
            _set_states(of, after)
            results.append((_unpacked(reply), _unpacked(keeps)))
        return results

    def _functions(self, client: int) -> tuple[Any, ...]:
        own = self._clients.own[client]
        return own.task, own.make_optimizer, own.make_scheduler, self._clients.schedule


@contextmanager
def in_workers(clients: Clients, count: int) -> Iterator[InWorkers]:
    """Yield ``InWorkers`` with ``count`` processes for the ``with`` block, see ``Workers``.

    Raises:
        CannotMove: A loader has worker processes of its own, or a part of the clients cannot be pickled by joblib's cloudpickle.
    """
    if number := max(getattr(own.loader, "num_workers", 0) for own in clients.own):
        raise CannotMove(f"worker processes cannot start those of a DataLoader with num_workers={number}: give num_workers=0, or workers=1")
    workers = Workers(count)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
            path = Path(folder, "clients")
            path.write_bytes(_pickled(clients))
            yield InWorkers(clients, workers, path)
    finally:
        workers.close()


def _pickled(clients: Clients) -> bytes:
    try:
        return bytes(dumps(clients))
    except Exception as error:  # whatever an object of the user's own raises
        raise CannotMove(
            f"the clients cannot be moved to worker processes, which need copies of network, data, task and functions "
            f"({type(error).__name__}: {error}): take workers=1, or make this object where it is used"
        ) from error


def _work(
    path: str,
    same: tuple[int, torch.dtype],
    functions: tuple[Any, ...],
    packed: Instruction,
    rounds: int,
    client: int,
    kept: ClientState,
    states: Sequence[Any],
) -> Any:
    """Compute one client's round in a worker process.

    The worker uses as many threads as its parent, since another number of threads would change the order of sums.

    Args:
        path: The file with all clients.
        same: The number of threads and the default dtype of the parent process.
        functions: The client's task, the makers of its optimiser and its scheduler, and the schedule.
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
    task, optimizer, scheduler, clients.schedule = functions
    clients.own[client] = one = replace(clients.own[client], task=task, make_optimizer=optimizer, make_scheduler=scheduler)
    _set_states(own := generators(one.loader), states)
    reply, keeps = clients.compute(_unpacked(packed), rounds, client, _unpacked(kept))
    return _packed(reply), _packed(keeps), [one.get_state().numpy() for one in own]


@lru_cache(maxsize=1)
def _read(path: str) -> Clients:
    clients: Clients
    clients = pickle.loads(Path(path).read_bytes())
    return clients


def _set_states(of: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    for one, state in zip(of, states, strict=True):
        one.set_state(torch.from_numpy(state.copy()))


def _packed(value: Value) -> Value:
    """Return ``value`` with NumPy arrays in place of tensors, since joblib passes large arrays through shared memory."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
