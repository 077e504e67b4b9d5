"""Compute the clients of a federation in worker processes."""

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
from joblib import wrap_non_picklable_objects
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fl_bn.federation.engines.clients import Clients
from fl_bn.federation.engines.engine import Result
from fl_bn.federation.engines.workers import Workers
from fl_bn.federation.loader_generators import generators
from fl_bn.federation.loaders import SeededBatches
from fl_bn.federation.payload import to_numpy, to_tensors
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.task import is_ours

Value = TypeVar("Value", Instruction, ClientState, Reply)


MOST_BYTES = 2**30
"""The largest size of all clients' data, in bytes, for which processes start by themselves. Each process gets a copy."""


def can_move(clients: Clients) -> bool:
    """Tell whether worker processes can compute the clients with the same effects as this process.

    A user's own code may change variables, and changes in a worker process are lost. So the tasks must be fl-bn's. The
    loaders must be ``SeededBatches``, or DataLoaders of a TensorDataset with ``num_workers=0`` and torch's own
    ``collate_fn``. The clients must train on a CPU, and their data must not exceed ``MOST_BYTES``.
    """
    if clients.device.type != "cpu" or not all(is_ours(own.task) for own in clients.own):
        return False
    size = 0
    tested = {id(own.test): own.test for own in clients.own if own.test is not None and own.settings.local_evaluation}
    for loader in (*(own.loader for own in clients.own), *tested.values()):
        if isinstance(loader, SeededBatches):
            tensors: Sequence[Tensor] = (loader.samples.x, loader.samples.y)
        elif type(loader) is DataLoader and type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
            if loader.num_workers:
                return False
            tensors = loader.dataset.tensors
        else:
            return False
        size += sum(tensor.nbytes for tensor in tensors)
    return size <= MOST_BYTES


def check_loaders(clients: Clients, count: int) -> None:
    """Check that no client's DataLoader starts processes of its own. A worker process cannot start further ones.

    Args:
        clients: The clients.
        count: The number of worker processes, for the error message.

    Raises:
        ValueError: A DataLoader has ``num_workers`` above 0.
    """
    for client, own in enumerate(clients.own):
        for loader in (own.loader, own.test if own.settings.local_evaluation else None):
            if number := getattr(loader, "num_workers", 0):
                raise ValueError(
                    f"workers={count} computes clients in worker processes, which cannot start further ones, but client {client}'s "
                    f"DataLoader has num_workers={number}: give the DataLoader num_workers=0, or Federation workers=1"
                )


class InWorkers:
    """Compute clients in worker processes. All clients are pickled to a file in ``folder``. Each worker reads this file once."""

    def __init__(self, clients: Clients, workers: Workers, folder: Path) -> None:
        self._clients, self._workers, self._path = clients, workers, folder / "clients"
        self._path.write_bytes(pickle.dumps(wrap_non_picklable_objects(clients, keep_wrapper=False)))

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
def in_workers(clients: Clients, count: int) -> Iterator[InWorkers]:
    """Yield ``InWorkers`` with ``count`` processes for the ``with`` block, see ``Workers``."""
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
    reply, keeps = clients.compute(_unpacked(packed), rounds, client, _unpacked(kept))
    return _packed(reply), _packed(keeps), [one.get_state().numpy() for one in own]


@lru_cache(maxsize=1)
def _read(path: str) -> Clients:
    clients: Clients = pickle.loads(Path(path).read_bytes())
    return clients


def _packed(value: Value) -> Value:
    """Return ``value`` with NumPy arrays in place of tensors, since joblib passes large arrays through shared memory."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
