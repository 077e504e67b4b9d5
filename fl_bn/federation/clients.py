"""The clients' halves of the library's federation: each trains or measures on its own loader, here or in a worker process."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from joblib import wrap_non_picklable_objects
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.derived import from_pickle, to_pickle
from fl_bn.exchange.local import LocalExchange
from fl_bn.federation.client import LocalRound
from fl_bn.federation.loaders import Loader, SeededBatches, generators
from fl_bn.federation.local import torch_seed
from fl_bn.federation.network import Network
from fl_bn.federation.one_sample import Trainable
from fl_bn.federation.payload import to_numpy, to_tensors
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.training import DROPOUT, SUBSET, train
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.federation.workers import Workers
from fl_bn.methods import Method, Phase, Report
from fl_bn.task import Task

Connect = Callable[[int], LocalExchange]
LEFT_OUT = "left-out"  # of a reply's metrics: batches of one sample that the client did not train on
Value = TypeVar("Value", Instruction, ClientState, Reply)


@dataclass
class Clients:
    """Holds what all clients of a federation have in common, and each one's loader.

    ``model``: converted for ``method``, not changed. ``rounds``: of the run, for ``schedule``.
    """

    model: nn.Module
    method: Method
    device: torch.device
    loaders: Sequence[Loader]
    settings: LocalTraining
    task: Task
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    schedule: Callable[[int, int], float]
    seed: int
    rounds: int = 1

    def __post_init__(self) -> None:
        self.network = Network(self.model, self.method, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "network"} | {"model": to_pickle(self.model)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.model = from_pickle(self.model)
        self.__post_init__()

    @property
    def epochs(self) -> int:
        """Passes over a loader in a round."""
        return self.settings.epochs

    def optimizer(self, parameters: Iterable[nn.Parameter], asked: Instruction) -> Optimizer:
        """Return a fresh one, at the learning rate of the round that is ``asked`` for."""
        optimizer = self.make_optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.schedule(asked.round, self.rounds)
            if asked.rate_share != 1:
                group["lr"] = group["lr"] * asked.rate_share
        return optimizer

    def train(self, asked: Instruction, client: int, kept: ClientState, connect: Connect | None = None) -> tuple[Reply, ClientState]:
        """One client's round of training."""
        with self.network.lend() as lent:
            round = LocalRound(lent, self.method, asked, kept, self.settings, connect)
            loader = self.loaders[client]
            if self.method.reports(asked.phase) is Report.PASS:
                self._measure(round, client)
            optimizer = self.optimizer(round.parameters.values(), asked)
            optimizer.register_step_post_hook(lambda optimizer, args, named: round.optimizer_stepped(optimizer))
            scheduler = None if self.make_scheduler is None else self.make_scheduler(optimizer)
            batches = loader.epochs(self.seed, client, asked.round, self.epochs) if isinstance(loader, SeededBatches) else loader
            passes = 1 if isinstance(loader, SeededBatches) else self.epochs
            usable = Trainable(round, batches, self.task, isinstance(loader, SeededBatches))
            with self._seeded(client, asked.round, DROPOUT), round.open():
                trained = [train(round, usable, self.task, optimizer, scheduler) for _ in range(passes)]
            told = {LEFT_OUT: float(usable.left_out)} if usable.left_out else {}
            count = sum(part.samples for part in trained)
            if count == 0:  # it sits the round out, and the others' exchange
                if connect is not None:
                    connect(0).close()
                return Reply(client, {}, 0, 0, told, asked.round, round.network.signature), kept
            loss = sum(part.loss * part.samples for part in trained) / count
            return round.reply(count // self.epochs, loss, client=client, metrics=told)

    def measure(self, asked: Instruction, client: int, kept: ClientState, connect: Connect | None = None) -> tuple[Reply, ClientState]:
        """One client's part in a statistics-only exchange."""
        with self.network.lend() as lent:
            round = LocalRound(lent, self.method, asked, kept, connect=connect)
            self._measure(round, client)
            return round.reply(round.measured_samples, client=client)

    def _measure(self, round: LocalRound, client: int) -> None:
        with self._seeded(client, round.instruction.round, SUBSET):
            round.measure(self.loaders[client], self.task)

    def _seeded(self, client: int, round: int, purpose: int) -> Any:
        """A shuffled loader, dropout and the like then draw the same wherever, and after whatever, this client is computed."""
        return torch_seed(int(seeded(self.seed, client, round, purpose).integers(2**62)), self.device)


class InWorkers:
    """The same in worker processes. ``clients``: written to ``folder`` once, read by each worker once."""

    def __init__(self, clients: Clients, workers: Workers, folder: Path) -> None:
        self._clients, self._workers, self._path = clients, workers, folder / "clients"
        self._path.write_bytes(pickle.dumps(wrap_non_picklable_objects(clients, keep_wrapper=False)))

    def work(self, asked: Instruction, clients: Sequence[int], kept: Sequence[ClientState]) -> list[tuple[Reply, ClientState]]:
        """Return what each client replies and keeps, in order. Raises the error of the first client that failed."""
        packed, same = _packed(asked), (torch.get_num_threads(), torch.get_default_dtype())
        states = [[one.get_state().numpy() for one in generators(self._clients.loaders[client])] for client in clients]
        tasks = [(str(self._path), same, packed, *one) for one in zip(clients, map(_packed, kept), states, strict=True)]
        results = []
        for client, done in zip(clients, list(self._workers.run(_work, tasks)), strict=True):
            if done.error is not None:
                done.error.add_note(f"in the worker process of client {client}")
                raise done.error
            reply, keeps, after = done.value
            for one, state in zip(generators(self._clients.loaders[client]), after, strict=True):
                one.set_state(torch.from_numpy(state))
            results.append((_unpacked(reply), _unpacked(keeps)))
        return results


@contextmanager
def in_workers(clients: Clients, count: int) -> Iterator[InWorkers]:
    """``count`` processes, see ``Workers``, for the block."""
    workers = Workers(count)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
            yield InWorkers(clients, workers, Path(folder))
    finally:
        workers.close()


def _work(path: str, same: tuple[int, torch.dtype], asked: Instruction, client: int, kept: ClientState, states: Sequence[Any]) -> Any:
    """In a worker: with as many threads as the parent's, since sums of several threads are made in another order."""
    threads, dtype = same
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    clients, asked = _read(path), _unpacked(asked)
    for one, state in zip(own := generators(clients.loaders[client]), states, strict=True):
        one.set_state(torch.from_numpy(state.copy()))
    work = clients.measure if asked.phase is Phase.MEASURE else clients.train
    reply, keeps = work(asked, client, _unpacked(kept))
    return _packed(reply), _packed(keeps), [one.get_state().numpy() for one in own]


@lru_cache(maxsize=1)
def _read(path: str) -> Clients:
    clients: Clients = pickle.loads(Path(path).read_bytes())
    return clients


def _packed(value: Value) -> Value:
    """With NumPy arrays in place of tensors, of which large ones lie in memory that processes share."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
