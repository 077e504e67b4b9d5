"""Compute the clients of a federation in worker processes."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from operator import is_not
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from joblib import wrap_non_picklable_objects
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from fl_bn.federation.engines.clients import Clients
from fl_bn.federation.engines.workers import Workers
from fl_bn.federation.loaders import SeededBatches
from fl_bn.federation.local import generators
from fl_bn.federation.payload import to_numpy, to_tensors
from fl_bn.federation.source import Result
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.task import is_ours
from fl_bn.task.targets import tensors_in

Value = TypeVar("Value", Instruction, ClientState, Reply)


MOST_BYTES = 2**30
"""The largest size of all clients' data, in bytes, for which processes start by themselves. Each process gets a copy."""


LARGE = 2**24
"""The size of pickled objects, in bytes, from which on changes of them are not looked for before each round."""


class CannotMove(ValueError):
    """Report what cannot be moved to a worker process."""


def why_stay(clients: Clients) -> str:
    """Return why the clients stay in this process where nobody has asked for worker processes; empty if they may move.

    Worker processes have copies of everything. So tasks must be fl-bn's, and loaders ``SeededBatches``, or DataLoaders of a
    TensorDataset with ``num_workers=0``, torch's own ``collate_fn`` and torch's own samplers. Functions are copied anew when what
    they read changes, except named functions of a module, which a worker imports. The data must not exceed ``MOST_BYTES``.
    """
    size = 0
    for client, own in enumerate(clients.own):
        if not is_ours(own.task):
            return f"the task of client {client} is not fl-bn's own"
        for function in (own.make_optimizer, own.make_scheduler, clients.schedule):
            if function is not None and not _moves(function):
                return f"a worker process would import {function!r} anew, without the changes of this process: give a lambda"
    tested = {id(own.test): own.test for own in clients.own if own.test is not None and own.settings.local_evaluation}
    for loader in (*(own.loader for own in clients.own), *tested.values()):
        tensors = _data(loader)
        if tensors is None or (isinstance(loader, DataLoader) and not _is_torchs(loader)):
            return f"a {type(loader).__name__} has parts other than torch's own: give SeededBatches"
        size += sum(tensor.nbytes for tensor in tensors)
    return f"the data have {size / 2**30:.3g} GiB" if size > MOST_BYTES else ""


def _moves(function: Any) -> bool:
    """Tell whether ``function`` is torch's or fl-bn's, or cloudpickle writes it with the variables that it reads, as it does lambdas."""
    while isinstance(function, partial):
        function = function.func
    return function.__module__.partition(".")[0] in ("torch", "fl_bn", "__main__") or "<" in getattr(function, "__qualname__", "")


def _data(loader: Any) -> Sequence[Tensor] | None:
    """Return the tensors from which a loader draws its batches; None if they are unknown."""
    if isinstance(loader, SeededBatches):
        return loader.samples.x, loader.samples.y
    return loader.dataset.tensors if type(loader) is DataLoader and type(loader.dataset) is TensorDataset else None


def _is_torchs(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader has torch's own parts alone, and no processes."""
    own = type(loader.sampler) in (SequentialSampler, RandomSampler) and type(loader.batch_sampler) is BatchSampler
    return own and loader.collate_fn is default_collate and not loader.num_workers


def _version(tensor: Tensor) -> int:
    """Return a number that rises with every change in place; 0 for a tensor of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _pickled(one: Any) -> bytes:
    return pickle.dumps(wrap_non_picklable_objects([one], keep_wrapper=False))


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
    """Compute clients in worker processes. All clients are pickled to a file in ``folder``. Each worker reads this file once.

    If tensors of the data are changed by torch or replaced, or variables that tasks and functions hold, the file is written
    again. Other changes do not reach the workers, such as those of a sampler, or of the NumPy array behind a tensor.
    """

    def __init__(self, clients: Clients, workers: Workers, folder: Path) -> None:
        self._clients, self._workers, self._folder, self._versions = clients, workers, folder, 0
        self._large = set[int]()  # ids of tasks and functions of at least LARGE bytes (a teacher network, say)
        self._data, self._checked = list[Tensor](), cast(Instruction | None, None)
        self._write()

    def _write(self) -> None:
        """Write all clients to a file of a new name, so that every worker reads it.

        Raises:
            CannotMove: A part of the clients cannot be pickled, not even by joblib's cloudpickle.
        """
        self._versions += 1
        self._data = self._tensors()
        try:
            written, self._written = _pickled(self._clients), self._state()
        except Exception as error:  # whatever an object of the user's own raises
            raise CannotMove(
                f"the clients cannot be moved to worker processes, which need copies of network, data, task and functions "
                f"({type(error).__name__}: {error}): take workers=1, or make this object where it is used"
            ) from error
        self._path = self._folder / f"clients-{self._versions}"
        self._path.write_bytes(written)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors of all clients' data, as far as they are known."""
        own = self._clients.own
        loaders = [one.loader for one in own] + [one.test for one in own if one.settings.local_evaluation]
        return [tensor for loader in loaders for tensor in _data(loader) or tensors_in(loader)]

    def _state(self) -> tuple[Any, ...]:
        """Return a value that differs once a client's data, task or functions have changed in place since ``_write``."""
        every = self._clients.own
        made: dict[int, Any] = {id(one): one for own in every for one in (own.task, own.make_optimizer, own.make_scheduler)}
        made |= {id(self._clients.schedule): self._clients.schedule}
        small = {place: _pickled(one) for place, one in made.items() if place not in self._large}
        self._large |= {place for place, written in small.items() if len(written) >= LARGE}
        return [small[place] for place in small if place not in self._large], [_version(tensor) for tensor in self._data]

    def _changed(self) -> bool:
        """Return whether the file is out of date."""
        now = self._tensors()
        return len(now) != len(self._data) or any(map(is_not, now, self._data)) or self._state() != self._written

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
        if instruction is not self._checked and self._changed():
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
    with clients.given_unused():
        reply, keeps = clients.compute(_unpacked(packed), rounds, client, _unpacked(kept))
    return _packed(reply), _packed(keeps), [one.get_state().numpy() for one in own]


@lru_cache(maxsize=1)
def _read(path: str) -> Clients:
    clients: Clients
    (clients,) = pickle.loads(Path(path).read_bytes())
    return clients


def _packed(value: Value) -> Value:
    """Return ``value`` with NumPy arrays in place of tensors, since joblib passes large arrays through shared memory."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
