"""Describe how a ``Federation``'s clients train on a loader's batches, here or in workers."""

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
from joblib.externals.loky.backend.reduction import dumps
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.exchange.local import LocalExchange
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Outcome, Result, client_round
from fl_bn.federation.engines.workers import Workers
from fl_bn.federation.loaders import Loader, SeededBatches, described
from fl_bn.federation.local import generators
from fl_bn.federation.network import Network
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import SUBSET, SampleLoop, Trained
from fl_bn.federation.values import ClientState, Instruction, Reply, to_numpy, to_tensors
from fl_bn.methods import Method
from fl_bn.support.names import noted
from fl_bn.task import Task

Connect = Callable[[int], LocalExchange]
Value = TypeVar("Value", Instruction, ClientState, Reply)


@dataclass(frozen=True)
class Own:
    """Hold the loaders and settings of one client.

    Attributes:
        make_optimizer: Makes an optimiser of parameters, with the rate before
            ``schedule``.
        make_scheduler: Makes a scheduler of the rate within a round, if any.
        rate_share: The client's learning rate divided by the instruction's.
    """

    loader: Loader
    task: Task
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    settings: LocalTraining
    rate_share: float = 1.0


@dataclass
class Clients:
    """Hold all clients of a federation: common values, and each one's own.

    Attributes:
        model: The network, converted for ``method``; it stays unchanged.
        schedule: ``schedule(round, rounds)`` returns the factor of the learning
            rate.
        given: The parameters of the user's own network, which is only copied.
    """

    model: nn.Module
    method: Method
    device: torch.device
    own: list[Own]
    schedule: Callable[[int, int], float]
    seed: int
    given: Sequence[nn.Parameter] = ()

    def __post_init__(self) -> None:
        self.network = Network(self.model, self.method, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("network", "given")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @contextmanager
    def given_unused(self) -> Iterator[None]:
        """Raise ValueError if training in the block gives a gradient to the user's own network.

        Its weights never change, since clients train copies.
        """
        before = [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self.given]
        yield
        if before != [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self.given]:
            raise ValueError(
                "the loss gave gradients to the network that was given to the federation, but each client trains a copy: put such a term "
                "into the network's output, or call a teacher under torch.no_grad()"
            )

    def instruction(self, client: int, instruction: Instruction) -> Instruction:
        """Return ``instruction`` with the learning rate of a client's own optimiser."""
        share = self.own[client].rate_share
        return instruction if share == 1 else replace(instruction, learning_rate=instruction.learning_rate * share)

    def compute(self, instruction: Instruction, rounds: int, client: int, kept: ClientState, connect: Connect | None = None) -> Result:
        """Carry out a client's round alone, training or measuring."""
        doing = f"in round {instruction.round}" if instruction.trains else "which measured its statistics"
        with noted(lambda: f"at client {client}, {doing}. Its loader: {described(self.own[client].loader)}"):
            own, loop = self.instruction(client, instruction), LoaderLoop(self, client, rounds)
            with self.network.lend() as lent:
                return client_round(lent, self.method, own, kept, loop, self.own[client].settings, connect)


class LoaderLoop(SampleLoop):
    """Train on one client's loader, in a run of ``rounds`` rounds."""

    def __init__(self, clients: Clients, client: int, rounds: int) -> None:
        own = self.own = clients.own[client]
        self._schedule, self._rounds = clients.schedule, rounds
        samples: Any = own.loader.samples if isinstance(own.loader, SeededBatches) else ()
        super().__init__(samples, clients.seed, client, own.task)
        if not isinstance(own.loader, SeededBatches):  # whose ``epochs`` returns the batches of all epochs
            self.passes = own.settings.epochs

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Return the batches to train on."""
        return self._in_order(round, self.own.settings.epochs)

    def _in_order(self, round: LocalRound, epochs: int = 1) -> Iterable[Any]:
        """Return the loader, ``SeededBatches`` in the round's order, of which any first batches are a random subset."""
        loader = self.own.loader
        return loader.epochs(self.seed, self.client, round.instruction.round, epochs) if isinstance(loader, SeededBatches) else loader

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass over the loader."""
        with self.seeded(round, SUBSET):
            round.measure(self._in_order(round), self.task)

    def pass_inputs(self, round: LocalRound) -> Iterator[Any]:
        """Yield the statistics pass's inputs, batch by batch."""
        return round.statistics_pass.inputs(self._in_order(round), self.task)

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make and check an optimiser with the round's learning rate."""
        optimizer = self.own.make_optimizer(round.parameters.values())
        check_parameters(optimizer, round.parameters.values())
        for group in optimizer.param_groups:
            if "lr" not in group:
                continue
            group["lr"] = group["lr"] * self._schedule(round.instruction.round, self._rounds)
            if round.instruction.rate_share != 1:
                group["lr"] = group["lr"] * round.instruction.rate_share
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of the rate within the round, if any."""
        return None if self.own.make_scheduler is None else self.own.make_scheduler(optimizer)

    def weighed(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return an epoch's samples and mean loss, or the measured samples."""
        if not round.trains:
            return Outcome(round.statistics_pass.samples, client=self.client)
        if (count := sum(part.samples for part in trained)) == 0:
            return Outcome(0, client=self.client)
        loss = sum(part.loss * part.samples for part in trained) / count
        largest = max(part.samples for part in trained) * len(trained)  # an epoch may be smaller than others, by random batch sizes
        return Outcome(max(1, largest // self.own.settings.epochs), loss, client=self.client)


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that a user's optimiser updates some of its given ``parameters``, and no others.

    Raises:
        ValueError: The function ignores its argument, or reuses an optimiser.
    """
    given = {id(p) for p in parameters}
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in given for p in mine)
    if foreign or not mine:
        raise ValueError(
            f"optimizer must update the parameters that it is given, and no others, but {foreign} of the {len(mine)} of its "
            f"{type(optimizer).__name__} are others: make it from the argument, as in lambda parameters: SGD(parameters, lr=0.1)"
        )


class CannotMove(ValueError):
    """Report what cannot be moved to a worker process."""


class InWorkers:
    """Compute clients in ``count`` processes, each of which reads the pickled clients once.

    Tasks and functions are sent for every round, with changes by the user's code.
    Data is not.

    Raises:
        CannotMove: A loader has worker processes, or the clients cannot be pickled.
    """

    def __init__(self, clients: Clients, count: int) -> None:
        if number := max(getattr(own.loader, "num_workers", 0) for own in clients.own):
            raise CannotMove(f"worker processes cannot start those of a DataLoader with num_workers={number}: give num_workers=0")
        try:
            pickled = bytes(dumps(clients))
        except Exception as error:  # whatever an object of the user's own raises
            raise CannotMove(
                "the clients cannot be moved to worker processes, which need copies of network, data, task and functions "
                f"({type(error).__name__}: {error}): take workers=1, or make this object where it is used"
            ) from error
        self._clients, self._workers = clients, Workers(count)
        self._folder = tempfile.TemporaryDirectory(prefix="fl-bn-")
        self._path = Path(self._folder.name, "clients")
        self._path.write_bytes(pickled)

    def close(self) -> None:
        """Stop using the processes."""
        self._workers.close()
        self._folder.cleanup()

    def work(self, instruction: Instruction, rounds: int, clients: Sequence[int], kept: Sequence[ClientState]) -> list[Result]:
        """Compute clients' rounds in order, or raise the first client's error."""
        packed, same = _packed(instruction), (torch.get_num_threads(), torch.get_default_dtype())
        every = [self._clients.own[client] for client in clients]
        functions = [(one.task, one.make_optimizer, one.make_scheduler, self._clients.schedule) for one in every]
        own = [generators(one.loader) for one in every]
        states = [[one.get_state().numpy() for one in of] for of in own]
        tasks = [
            (str(self._path), same, used, packed, rounds, client, _packed(keeps), of)
            for client, used, keeps, of in zip(clients, functions, kept, states, strict=True)
        ]
        results = []
        for of, done in zip(own, list(self._workers.run(_work, tasks)), strict=True):
            if done.error is not None:
                raise done.error
            reply, keeps, after = done.value
            _set_states(of, after)
            results.append((_unpacked(reply), _unpacked(keeps)))
        return results


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
    """Compute one client's round in a worker process. Tensors travel as NumPy arrays.

    The worker uses as many threads as its parent (``same``), for the same order of
    sums, and gets and returns ``states`` of the loader's generators.
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
    """Return ``value`` with NumPy arrays, which joblib passes through shared memory."""
    sections: Any = {section: to_numpy(tensors) for section, tensors in value.sections.items()}
    return replace(value, sections=sections)


def _unpacked(value: Value) -> Value:
    sections: Any = value.sections
    tensors: dict[str, dict[str, Tensor]] = {section: to_tensors(arrays) for section, arrays in sections.items()}
    return replace(value, sections=tensors)
