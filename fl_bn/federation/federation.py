"""Run a whole federation in this process, in plain torch: without Flower, a config, or files."""

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
    """Run clients and a server in this process.

    >>> from fl_bn import Federation, methods
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> clients = [[(torch.randn(16, 4), torch.randint(0, 2, (16,)))] for client in range(3)]
    >>> federation = Federation(net, methods.fixbn(), clients, test=clients[0], progress=False)
    >>> [record.round for record in federation.run(rounds=2)]
    [1, 2]

    ``history`` has all records, ``model`` the network as evaluated last. More: docs/start/plain-torch.md.

    Args:
        model: The network as you wrote it, not converted. It stays unchanged.
        method: The method, one of ``fl_bn.methods``.
        clients: The training batches of each client: a list, a DataLoader or ``SeededBatches``, but no
            generator.
        task: Reads a batch, and computes loss and metrics.
        optimizer: Makes a client's optimiser of parameters, anew in every round. Default: SGD with learning
            rate 0.05 and momentum 0.9.
        scheduler: Makes a scheduler of that optimiser, stepped after every batch. Default: none.
        schedule: ``schedule(round, rounds)``: a factor of the learning rate for a whole round. Default: 1.
        objective: The local objective, such as ``FedProx``. Default: the loss alone.
        local_epochs: Passes over a client's batches in a round, at least 1.
        test: The batches to evaluate on. Default: there is no evaluation.
        evaluate_every: Rounds between evaluations, at least 1; the last round is always evaluated.
        fraction: The share of the clients that train in a round, in (0, 1].
        server_optimizer: Steps on the pseudo-gradient of the weights. Default: the average is the new model.
        defence: Rules against Byzantine clients. Default: none.
        calibrate: Statistics-only exchanges before round 1; -1: as many as make all layers exact; -2: so if
            the method needs it, else none.
        unit_scale: Whether the weights before BatchNorm are rescaled after that calibration.
        clip: ``auto``: the gradients of SGD are clipped if the method needs it; ``none``: never.
        seed: Decides the cohorts, the order of ``SeededBatches``, and dropout.
        device: The device on which clients train. Default: that of ``model``.
        engine: ``sequential``, or ``vectorised``: the clients of a cohort as one program, for
            ``SeededBatches``.
        workers: The number of processes that compute clients. The results have the same bits. 0: one per
            core, once the rounds that are left are worth their start, and if all parts are fl-bn's or torch's
            own (see ``engines.processes.can_move``).
        progress: Whether a terminal shows a progress bar.
        callbacks: Called after every round and at the end, see ``Callback``.

    Raises:
        ValueError: An argument is out of range, or two of them do not fit together.
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
        workers: int = 0,
        progress: bool = True,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_name("engine", engine, ENGINES)
        if not 0 <= workers <= MOST_WORKERS or (engine == VECTORISED and workers > 1):
            raise ValueError(
                f"workers must be 0..{MOST_WORKERS}, and 0 or 1 with engine='vectorised', which has a cohort in one process, "
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
        """Return the method of the run."""
        return self.server.method

    @property
    def model(self) -> nn.Module:
        """Return a copy of the shared network as evaluated last, in evaluation mode.

        If the method keeps BatchNorm, its layers are BatchNorm.
        """
        return self._transport.model(self._evaluated, batches_trained(self.history))

    def client_model(self, client: int) -> nn.Module:
        """Return the network of one client: the shared tensors as evaluated last, and the client's own.

        Args:
            client: The client's number, from 0.
        """
        return self._transport.with_own(self.model, client)

    def save(self, path: str | Path) -> None:
        """Save the shared model as evaluated last, as safetensors.

        The names are those of the unconverted network's state_dict. Tensors that the clients keep are left
        out. docs/how-to/export.md says which methods' files load into which network.

        Args:
            path: The file.
        """
        save_file(self.server.shared.whole(self._evaluated, batches_trained(self.history)), str(path))

    def run(self, rounds: int) -> Iterator[RoundRecord]:
        """Train for ``rounds`` rounds, and yield each one's record: loss, evaluation, drift of the statistics.

        This is a generator: a round runs when its record is requested. A second call trains on from the
        present model.

        Args:
            rounds: The number of rounds; 0: only the statistics are measured.

        Yields:
            The record of each round.

        Raises:
            Diverged: In three rounds in a row no reply could be used.
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
        """Return a progress bar, if there is a terminal and it is wanted."""
        if not (self.progress and sys.stderr.isatty()):
            return []
        from fl_bn.federation.bar import Bar  # imports rich

        return [Bar(sys.stderr, self.task)]

    def evaluate(self, batches: Loader | None = None) -> dict[str, float]:
        """Compute loss and the task's metrics of the shared model.

        If clients have models of their own (FedBN, SiloBN), the result is the mean over the clients that have
        trained so far.

        Args:
            batches: The batches to evaluate on. Default: ``test``.

        Returns:
            Metrics by name; none without batches.
        """
        if batches is not None:
            check_loader("the batches to evaluate", batches, again=self.method.personal)
        batches = self.test if batches is None else batches
        return {} if batches is None else self._transport.evaluate_on(batches, self.model)


def _bounded(method: Method, clip: str, optimizer: Optimizer, settings: LocalTraining) -> tuple[Method, LocalTraining]:
    """Bound the path of a client's SGD in a round, if ``clip`` says so.

    Args:
        method: The method.
        clip: ``auto`` or ``none``.
        optimizer: An optimiser of the clients' kind.
        settings: The settings of local training.

    Returns:
        The method and the settings for it.
    """
    check_name("clip", clip, ("auto", "none"))
    if clip == "none" or not isinstance(optimizer, optim.SGD) or settings.objective.travels:
        return method, settings
    how, limit = chosen(clip, settings.clip_limit, drifts=method.calibrate)
    return method.bounded(), replace(settings, momentum=float(optimizer.param_groups[0]["momentum"]), clip=how, clip_limit=limit)


def _rate_of(optimizer: Optimizer) -> float | None:
    rate = optimizer.param_groups[0].get("lr")
    return float(rate) if isinstance(rate, float | int) and rate > 0 else None
