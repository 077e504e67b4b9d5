"""Describe the clients of a ``Federation``: their loaders and settings, and how they train on the batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.exchange.local import LocalExchange
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Outcome, Result, client_round
from fl_bn.federation.loaders import Loader, SeededBatches
from fl_bn.federation.network import Network
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import SUBSET, OwnLoop, Trained
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import Method
from fl_bn.task import Task

Connect = Callable[[int], LocalExchange]


@dataclass(frozen=True)
class Own:
    """Hold the loaders and settings of one client. They may differ from client to client.

    Attributes:
        loader: Its training batches.
        task: Reads a batch and computes its loss.
        make_optimizer: Makes an optimiser for given parameters, with the learning rate before ``schedule`` changes it.
        make_scheduler: Makes the scheduler of the learning rate within a round. None: the rate stays the same.
        settings: The settings of local training.
        rate_share: The client's learning rate divided by the instruction's learning rate.
    """

    loader: Loader
    task: Task
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    settings: LocalTraining
    rate_share: float = 1.0

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return the values that must be equal for all clients that ``engine='vectorised'`` computes together."""
        return id(self.task), id(self.make_optimizer), id(self.make_scheduler), self.settings, self.rate_share


@dataclass
class Clients:
    """Hold all clients of a federation: the values that they have in common, and each client's own loaders and settings.

    Attributes:
        model: The network, converted for ``method``; it stays unchanged.
        method: The method.
        device: The device on which clients train.
        own: Each client's own loaders and settings.
        schedule: ``schedule(round, rounds)`` returns the factor of the learning rate.
        seed: The seed of the run.
        given: The parameters of the user's own network, of which clients train copies.
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
        """Check that training in the ``with`` block gives no gradient to the network that the user gave.

        Raises:
            ValueError: It does, so the loss uses this network. Its weights stay the same while clients train copies.
        """
        before = [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self.given]
        yield
        if before != [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self.given]:
            raise ValueError(
                "the loss gave gradients to the network that was given to the federation, but each client trains a copy: the loss would "
                "not change with the weights. Put such a term into the network's output, write a loop of your own (docs/how-to/loop.md), "
                "or, if this network is a teacher, call it under torch.no_grad()"
            )

    def instruction(self, client: int, instruction: Instruction) -> Instruction:
        """Return ``instruction`` with the learning rate of one client, which may have an optimiser of its own."""
        share = self.own[client].rate_share
        return instruction if share == 1 else replace(instruction, learning_rate=instruction.learning_rate * share)

    def compute(self, instruction: Instruction, rounds: int, client: int, kept: ClientState, connect: Connect | None = None) -> Result:
        """Carry out one client's round alone: training, or its part of a statistics-only exchange.

        Args:
            instruction: The server's instruction.
            rounds: The number of rounds of the run.
            client: The client's number.
            kept: The state that the client keeps.
            connect: Joins the layer-wise exchange, see ``LocalRound``.

        Returns:
            The reply, and the client's new state.
        """
        try:
            own, loop = self.instruction(client, instruction), LoaderLoop(self, client, rounds)
            with self.network.lend() as lent:
                return client_round(lent, self.method, own, kept, loop, self.own[client].settings, connect)
        except Exception as error:
            doing = f"in round {instruction.round}" if instruction.trains else "which measured its statistics"
            error.add_note(f"at client {client}, {doing}")
            raise


class LoaderLoop(OwnLoop):
    """Train on the batches of one client's loader.

    Args:
        clients: All clients.
        client: The client's number.
        rounds: The number of rounds of the run.
    """

    def __init__(self, clients: Clients, client: int, rounds: int) -> None:
        own = self.own = clients.own[client]
        self.client, self.seed, self.task = client, clients.seed, own.task
        self._schedule, self._rounds = clients.schedule, rounds
        if isinstance(own.loader, SeededBatches):  # whose ``epochs`` returns the batches of all epochs
            self.samples, self.passes = own.loader.samples, 1
        else:
            self.passes = own.settings.epochs

    def batches(self, round: LocalRound) -> Iterable[Any]:
        """Return the batches to train on."""
        loader = self.own.loader
        if isinstance(loader, SeededBatches):
            return loader.epochs(self.seed, self.client, round.instruction.round, self.own.settings.epochs)
        return loader

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass over the loader."""
        with self.seeded(round, SUBSET):
            round.measure(self.own.loader, self.task)

    def pass_inputs(self, round: LocalRound) -> Iterator[Any]:
        """Yield the inputs of the statistics pass, batch by batch."""
        return round.statistics_pass.inputs(self.own.loader, self.task)

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make a fresh optimiser, with the learning rate of ``round``.

        Raises:
            ValueError: The optimiser does not update the parameters that it was given, or also others.
        """
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
        """Make the scheduler of the learning rate within the round; None if the rate stays the same."""
        return None if self.own.make_scheduler is None else self.own.make_scheduler(optimizer)

    def weighed(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return the samples of one epoch, 0 if the loader gave no batch, and the mean loss, or the number of measured samples."""
        if not round.trains:
            return Outcome(round.statistics_pass.samples, client=self.client)
        if (count := sum(part.samples for part in trained)) == 0:
            return Outcome(0, client=self.client)
        loss = sum(part.loss * part.samples for part in trained) / count
        return Outcome(max(1, count // self.own.settings.epochs), loss, client=self.client)


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that ``optimizer`` updates some of the given ``parameters``, and no others.

    Args:
        optimizer: The optimiser that the user's function made.
        parameters: The parameters that the function was given.

    Raises:
        ValueError: The optimiser updates none of ``parameters``, or also others. The user's function then ignores its
            argument, or did not make the optimiser anew.
    """
    given = {id(p) for p in parameters}
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in given for p in mine)
    if foreign or not mine:
        raise ValueError(
            f"optimizer must update the parameters that it is given, and no others, but {foreign} of the {len(mine)} "
            f"parameters of its {type(optimizer).__name__} are others: make the optimiser anew from the argument, such as "
            "lambda parameters: SGD(parameters, lr=0.1)"
        )
