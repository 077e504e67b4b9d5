"""Describe the clients of a ``Federation``: their loaders and settings, and how a round draws batches from a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.bn.derived import from_pickle, to_pickle
from fl_bn.exchange.local import LocalExchange
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import client_round
from fl_bn.federation.loaders import Loader, SeededBatches
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.network import Copy, Network
from fl_bn.federation.one_sample import Trainable
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.source import Outcome, Result, Trained
from fl_bn.federation.sources import DROPOUT, SUBSET
from fl_bn.federation.steps import check_parameters, check_scheduler_steps
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import Method
from fl_bn.task import Task

Connect = Callable[[int], LocalExchange]
LEFT_OUT = "left-out"  # the name of a number in a reply: how many batches of one sample the client did not train on


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
        test: Its test batches; None if it has none.
    """

    loader: Loader
    task: Task
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    make_scheduler: Callable[[Optimizer], LRScheduler] | None
    settings: LocalTraining
    rate_share: float = 1.0
    test: Loader | None = None

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
    own: Sequence[Own]
    schedule: Callable[[int, int], float]
    seed: int
    given: Sequence[nn.Parameter] = ()

    def __post_init__(self) -> None:
        self.network = Network(self.model, self.method, self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "network"} | {"model": to_pickle(self.model)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.model = from_pickle(self.model)
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

    def round(
        self, client: int, model: Copy, instruction: Instruction, kept: ClientState, connect: Callable[[int], Any] | None = None
    ) -> LocalRound:
        """Make the round of one client, and load the tensors of the instruction and of the client into ``model``.

        Args:
            client: The client's number.
            model: A copy of the network.
            instruction: The server's instruction.
            kept: The state that the client keeps.
            connect: Joins the layer-wise exchange, see ``LocalRound``.
        """
        own, settings = self.own[client], None
        if instruction.trains:
            settings = own.settings
            if own.rate_share != 1:
                instruction = replace(instruction, learning_rate=instruction.learning_rate * own.rate_share)
        return LocalRound(model, self.method, instruction, kept, settings, connect)

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
            with self.network.lend() as lent:
                return client_round(self.round(client, lent, instruction, kept, connect), LoaderSource(self, client, rounds))
        except Exception as error:
            doing = f"in round {instruction.round}" if instruction.trains else "which measured its statistics"
            error.add_note(f"at client {client}, {doing}")
            raise


@dataclass(frozen=True)
class LoaderSource:
    """Draw the batches of one client from its loader.

    Attributes:
        clients: All clients of the federation.
        client: The client's number.
        rounds: The number of rounds of the run.
    """

    clients: Clients
    client: int
    rounds: int

    @property
    def own(self) -> Own:
        """Return the client's own loaders and settings."""
        return self.clients.own[self.client]

    @property
    def task(self) -> Task:
        """Return the client's task."""
        return self.own.task

    @property
    def test(self) -> Loader | None:
        """Return the client's test batches; None if it has none."""
        return self.own.test

    @property
    def loader(self) -> Loader:
        """Return the loader of the client's training batches."""
        return self.own.loader

    @property
    def samples(self) -> Samples:
        """Return the samples from which the loader draws its batches. The loader must be ``SeededBatches``."""
        assert isinstance(self.loader, SeededBatches)
        return self.loader.samples

    @property
    def passes(self) -> int:
        """Return how often a round iterates over ``batches``: once per epoch.

        For ``SeededBatches`` it is 1, since their ``epochs`` returns the batches of all epochs.
        """
        return 1 if isinstance(self.loader, SeededBatches) else self.own.settings.epochs

    def batches(self, round: LocalRound) -> Trainable:
        """Return the batches to train on. ``Trainable`` leaves out batches of one sample on which BatchNorm cannot train."""
        own, drawn = self.loader, isinstance(self.loader, SeededBatches)
        if isinstance(own, SeededBatches):
            own = own.epochs(self.clients.seed, self.client, round.instruction.round, self.own.settings.epochs)
        return Trainable(round, own, self.task, drawn)

    def measure(self, round: LocalRound) -> None:
        """Make the statistics pass over the loader."""
        with self._seeded(round, SUBSET):
            round.measure(self.loader, self.task)

    def pass_inputs(self, round: LocalRound) -> Iterator[Any]:
        """Yield the inputs of the statistics pass, batch by batch."""
        return round.statistics_pass.inputs(self.loader, self.task)

    def optimizer(self, round: LocalRound) -> Optimizer:
        """Make a fresh optimiser, with the learning rate of ``round``."""
        optimizer = self.own.make_optimizer(round.parameters.values())
        check_parameters(optimizer, round.parameters.values())
        for group in optimizer.param_groups:
            if "lr" not in group:
                continue
            group["lr"] = group["lr"] * self.clients.schedule(round.instruction.round, self.rounds)
            if round.instruction.rate_share != 1:
                group["lr"] = group["lr"] * round.instruction.rate_share
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Make the scheduler of the learning rate within the round; None if the rate stays the same."""
        scheduler = None if self.own.make_scheduler is None else self.own.make_scheduler(optimizer)
        if scheduler is not None:
            check_scheduler_steps(scheduler, optimizer)
        return scheduler

    @contextmanager
    def training(self, round: LocalRound, optimizer: Optimizer) -> Iterator[None]:
        """Record the learning rate of every step inside the ``with`` block, if the optimiser calls hooks (fl-bn's ``eager.SGD`` does not).

        Torch's random numbers in the block depend only on the seed, the client and the round.
        """
        handle = optimizer.register_step_post_hook(lambda optimizer, args, named: round.optimizer_stepped(optimizer))
        with self._seeded(round, DROPOUT):
            yield
        handle.remove()

    def full_gradient(self, round: LocalRound) -> Callable[[], dict[str, Tensor]] | None:
        """Return None: this source does not compute the gradient over all samples, which only SCAFFOLD's option 1 needs."""
        return None

    def outcome(self, round: LocalRound, batches: Iterable[Any], trained: Sequence[Trained]) -> Outcome:
        """Return the numbers for the client's reply: the samples of one epoch, the mean loss, and the batches left out.

        The number of samples is 0 if the loader gave no batch. In a round that only measures, it is the number of
        measured samples.
        """
        if not round.trains:
            return Outcome(round.statistics_pass.samples)
        assert isinstance(batches, Trainable)
        metrics = {LEFT_OUT: float(batches.left_out)} if batches.left_out else {}
        if (count := sum(part.samples for part in trained)) == 0:
            return Outcome(0, metrics=metrics)
        return Outcome(max(1, count // self.own.settings.epochs), sum(part.loss * part.samples for part in trained) / count, metrics)

    def _seeded(self, round: LocalRound, purpose: int) -> Any:
        own = seeded(self.clients.seed, self.client, round.instruction.round, purpose)
        return torch_seed(int(own.integers(2**62)), self.clients.device)
