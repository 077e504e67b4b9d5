"""A whole federation in this process, in plain torch: no Flower, no config, no files unless asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.derived import copied
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.callbacks import Callback, Callbacks
from fl_bn.federation.client import check_optimizer
from fl_bn.federation.clipping import chosen
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.eager import SGD
from fl_bn.federation.engines.clients import Clients
from fl_bn.federation.engines.local import LocalTransport
from fl_bn.federation.engines.vectorised import ENGINES, VECTORISED
from fl_bn.federation.engines.workers import MOST_WORKERS
from fl_bn.federation.loaders import Loader, check_loader
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.payload import Named
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.rounds import AS_METHOD, Rounds, constant_rate
from fl_bn.federation.run import Diverged, run
from fl_bn.federation.server import Server, check_learns
from fl_bn.federation.settings import LEARNING_RATE, LocalTraining
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, Objective
from fl_bn.roles import buffers_in_words, inputs_like
from fl_bn.support.names import check_name
from fl_bn.task import CLASSIFICATION, Task

__all__ = ["Diverged", "Federation"]
LOGGER = logging.getLogger("flwr")
SGD_05 = partial(SGD, lr=LEARNING_RATE, momentum=0.9)


class Federation:
    """Clients and a server in this process. ``model``: unconverted, not changed; ``clients``: each one's training batches.

    >>> from fl_bn import Federation, methods
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> clients = [[(torch.randn(16, 4), torch.randint(0, 2, (16,)))] for client in range(3)]
    >>> federation = Federation(net, methods.fixbn(), clients, test=clients[0], progress=False)
    >>> [record.round for record in federation.run(rounds=2)]
    [1, 2]

    ``history`` has every round's record, ``model`` the network as evaluated last. Every argument: docs/start/plain-torch.md.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        clients: Sequence[Loader],
        *,
        task: Task = CLASSIFICATION,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = SGD_05,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        schedule: Callable[[int, int], float] = lambda round, rounds: 1.0,
        objective: Objective = PLAIN,
        local_epochs: int = 1,
        test: Loader | None = None,
        evaluate_every: int = 1,
        fraction: float = 1.0,
        server_optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        calibrate: int = AS_METHOD,
        unit_scale: bool = True,
        clip: str = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        engine: str = "sequential",
        workers: int = 1,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_name("engine", engine, ENGINES)
        if not 0 <= workers <= MOST_WORKERS or (engine == VECTORISED and workers != 1):
            raise ValueError(
                f"workers must be 0..{MOST_WORKERS} (0: one per core), and 1 with engine='vectorised', which has a cohort in one process, "
                f"but got workers={workers} and engine={engine!r}"
            )
        if not clients or local_epochs < 1 or evaluate_every < 1:
            raise ValueError(
                f"a federation needs clients, and local_epochs and evaluate_every >= 1, but got {len(clients)} clients, {local_epochs} and "
                f"{evaluate_every}"
            )
        for number, loader in enumerate(clients):
            check_loader(f"client {number}", loader)
        if test is not None:
            check_loader("test", test)
        self.task, self.clients, self.test = task, clients, test
        self.progress, self.callbacks = progress, tuple(callbacks)
        settings = LocalTraining(batch_size=2, epochs=local_epochs, objective=objective)
        check_composition(method, settings, robust=defence.active)
        check_learns(model)
        example = optimizer(model.parameters())
        check_optimizer(objective, example)
        method, settings = _bounded(method, clip, example, settings)
        base = _rate_of(example)
        policy = Rounds(
            len(clients),
            fraction,
            seed=seed,
            evaluate_every=evaluate_every,
            calibrate=calibrate,
            unit_scale=unit_scale,
            rate=lambda round, rounds: (base or constant_rate(round, rounds)) * schedule(round, rounds),
            auxiliary=auxiliary(settings),
        )
        self.server = Server(model, method, policy, optimizer=server_optimizer, defence=defence)
        if buffers := buffers_in_words(self.server.model):
            LOGGER.info("%s", buffers)
        self.history: list[RoundRecord] = []
        where = torch.device(device) if device is not None else inputs_like(model).device
        pristine = copied(self.server.model)  # what the server has changes
        common = Clients(pristine, method, where, clients, settings, task, optimizer, scheduler, schedule, seed)
        self._transport = LocalTransport(self.server, common, test, workers, engine == VECTORISED)
        self._evaluated: Named = self.server.shared.tensors()

    @property
    def method(self) -> Method:
        return self.server.method

    @property
    def model(self) -> nn.Module:
        """A copy of the shared network as it was evaluated last, in evaluation mode; of methods that keep BatchNorm it is BatchNorm."""
        return self._transport.model(self._evaluated, batches_trained(self.history))

    def client_model(self, client: int) -> nn.Module:
        """Return the network of one client: the shared tensors as evaluated last, and those of its own."""
        return self._transport.with_own(self.model, client)

    def save(self, path: str | Path) -> None:
        """Save the shared model as evaluated last, as safetensors, by the names of the unconverted network's state_dict.

        The file holds all of it but tensors that the clients keep. Which methods' files load into which network: docs/how-to/export.md.
        """
        save_file(self.server.shared.whole(self._evaluated, batches_trained(self.history)), str(path))

    def run(self, rounds: int) -> Iterator[RoundRecord]:
        """Train for ``rounds`` rounds, and yield each one's record: loss, evaluation, how far the statistics moved.

        A generator: a round runs when its record is asked for. Called once more, it trains on from the model as it is.

        Raises:
            Diverged: Three rounds in a row no reply could be used.
        """
        callbacks = Callbacks([*self._bar(), *self.callbacks])
        try:
            with self._transport.serving(rounds):
                for one in run(self.server, self._transport, rounds):
                    self._evaluated = one.evaluated
                    self.history.append(one.record)
                    callbacks.on_round(one.record, rounds)
                    yield one.record
        except BaseException as error:
            callbacks.on_end(None if isinstance(error, GeneratorExit) else error)  # who asks for no more has what they wanted
            raise
        callbacks.on_end(None)

    def _bar(self) -> list[Callback]:
        """Return a progress bar on a terminal, where it is wanted."""
        if not (self.progress and sys.stderr.isatty()):
            return []
        from fl_bn.federation.bar import Bar  # imports rich

        return [Bar(sys.stderr, self.task)]

    def evaluate(self, batches: Loader | None = None) -> dict[str, float]:
        """Compute loss and the task's metrics of the shared model on ``batches`` (default: ``test``).

        Where clients have models of their own (FedBN, SiloBN): the mean over those of the clients that have trained so far.
        """
        if batches is not None:
            check_loader("the batches to evaluate", batches, again=self.method.personal)
        batches = self.test if batches is None else batches
        return {} if batches is None else self._transport.evaluate_on(batches, self.model)


def _bounded(method: Method, clip: str, optimizer: Optimizer, settings: LocalTraining) -> tuple[Method, LocalTraining]:
    """Return both for steps of ``optimizer``, whose path in a round is bounded where ``clip`` says so and it is SGD."""
    check_name("clip", clip, ("auto", "none"))
    if clip == "none" or not isinstance(optimizer, optim.SGD) or settings.objective.travels:
        return method, settings
    how, limit = chosen(clip, settings.clip_limit, drifts=method.calibrate)
    return method.bounded(), replace(settings, momentum=float(optimizer.param_groups[0]["momentum"]), clip=how, clip_limit=limit)


def _rate_of(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    return float(rate) if isinstance(rate, float | int) and rate > 0 else None
