"""Run a whole federation in this process, without Flower, a config, or files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_bn.bn.conversion import check_complete
from fl_bn.bn.modules import copied
from fl_bn.bn.roles import buffers_in_words, inputs_like
from fl_bn.federation.aggregation import NO_DEFENCE, Defence
from fl_bn.federation.arguments import (
    ARGUMENTS,
    FederationSpec,
    Loss,
    MakeOptimizer,
    MakeScheduler,
    Metrics,
    PerClient,
    Trials,
    each,
    own_tests,
    same_rate,
    tasks_of,
)
from fl_bn.federation.callbacks import Callback, Callbacks, Running, checked_callbacks
from fl_bn.federation.checkpoint import FederationState, check_same, set_generators
from fl_bn.federation.checkpoint import generators as global_generators
from fl_bn.federation.composition import check_composition, check_learns
from fl_bn.federation.engines.clients import Clients, Own
from fl_bn.federation.engines.local import LocalTransport
from fl_bn.federation.engines.vectorised import VECTORISED
from fl_bn.federation.gradients import bounded
from fl_bn.federation.loaders import Loader, check_clients, check_loader, check_not_one_batch, in_dtype
from fl_bn.federation.local import generators
from fl_bn.federation.optimizers import SGD, ServerOptimizer
from fl_bn.federation.passes import Measured, Newest, Passes
from fl_bn.federation.policy import ServerPolicy, checked_rate, constant_rate
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.run import Diverged, Round, run
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LEARNING_RATE, LocalTraining
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, Objective
from fl_bn.options import check_fits, refuse
from fl_bn.support.durable import save_network
from fl_bn.task import CLASSIFICATION, Task

__all__ = ["Diverged", "Federation"]
LOGGER = logging.getLogger("flwr")
SGD_05 = partial(SGD, lr=LEARNING_RATE, momentum=0.9)


class Federation:
    """Run clients and a server in this process.

    >>> from fl_bn import Federation, methods
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> clients = [[(torch.randn(16, 4), torch.randint(0, 2, (16,)))] for client in range(3)]
    >>> federation = Federation(net, methods.fixbn(), clients, test=clients[0])
    >>> [record.round for record in federation.run(rounds=2)]
    [1, 2]

    ``history`` has all records, ``model`` the network: docs/start/plain-torch.md.

    Args:
        model: The network as you wrote it. It stays unchanged.
        method: The method, one of ``fl_bn.methods``.
        clients: Each client's training batches: a list, a DataLoader or
            ``SeededBatches``, no generator.
        task: Reads a batch, and computes loss and metrics. ``task``, ``loss``,
            ``metrics``, ``optimizer`` and ``scheduler`` may also be lists with one
            value per client, or ``per_client(function)`` of the client's number.
        loss: ``loss(output, targets)`` returns a batch's mean. Default: the task's
            loss.
        metrics: Further metrics by name: objects with ``update``, ``compute`` and
            ``reset``, such as torchmetrics'. Each sees all test samples before its
            one call of ``compute``.
        optimizer: Makes a client's optimiser of parameters, in every round.
            Default: SGD with learning rate 0.05, momentum 0.9.
        scheduler: Makes a scheduler of that optimiser, stepped after every batch.
        schedule: ``schedule(round, rounds)`` returns a round's factor (> 0) of the
            learning rate. Default: 1.
        objective: The local objective, such as ``FedProx``. Default: the loss
            alone.
        local_epochs: Passes over a client's batches in a round, at least 1.
        test: The batches to evaluate on, or ``per_client(...)`` with each client's
            own. Default: no evaluation.
        server_optimizer: Steps along the pseudo-gradient of the weights, without
            earlier runs' momentum. Default: they become the clients' average.
        defence: Rules against Byzantine clients. Default: none.
        device: The device on which clients train. Default: that of ``model``.
        callbacks: Called at start and end, after rounds and evaluations, see
            ``Callback``.
        options: Fields of ``FederationSpec``: ``fraction``, ``evaluate_every``,
            ``seed``, ``calibrate``, ``unit_scale``, ``clip``, ``engine`` and
            ``workers``.

    Raises:
        ValueError: An argument has a wrong type or value, or two do not fit
            together.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        clients: Sequence[Loader],
        *,
        task: Task | Sequence[Task] | PerClient = CLASSIFICATION,
        loss: Loss | Sequence[Loss] | PerClient | None = None,
        metrics: Metrics | Sequence[Metrics] | PerClient | None = None,
        optimizer: MakeOptimizer | Sequence[MakeOptimizer] | PerClient = SGD_05,
        scheduler: MakeScheduler | Sequence[MakeScheduler] | PerClient | None = None,
        schedule: Callable[[int, int], float] = same_rate,
        objective: Objective = PLAIN,
        local_epochs: int = 1,
        test: Loader | PerClient | None = None,
        server_optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        device: torch.device | str | None = None,
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        spec = FederationSpec(**options)
        check_clients(clients)
        given = {"model": model, "method": method, "clients": clients, "objective": objective, "server_optimizer": server_optimizer}
        check_fits(ARGUMENTS, {**given, "defence": defence, "schedule": schedule, "local_epochs": local_epochs})
        for number, loader in enumerate(clients):
            check_loader(f"client {number}", loader)
        count = len(clients)
        self.clients = clients
        self.tests = own_tests(test, count, inputs_like(model).dtype)
        self.callbacks = checked_callbacks(callbacks)
        settings = LocalTraining(batch_size=2, epochs=local_epochs, objective=objective)
        check_composition(method, settings, robust=defence.active)
        check_learns(model)
        tasks, makers = tasks_of(task, loss, metrics, count), each("optimizer", optimizer, count)
        self.task = tasks[0]
        for number, (loader, own_task) in enumerate(zip(clients, tasks, strict=True)):
            check_not_one_batch(f"client {number}", loader, own_task)
            if self.tests is not None:
                check_not_one_batch(f"test of client {number}", self.tests[number], own_task)
        check_complete(model)
        where = inputs_like(model).device if device is None else torch.device(device)
        trials = Trials(model, makers, objective)
        base = trials.rate
        method, by_kind = bounded(method, spec.clip, trials.optimizers, settings)
        policy = ServerPolicy(
            count,
            rate=lambda round, rounds: (base or constant_rate(round, rounds)) * checked_rate("schedule", schedule, round, rounds),
            auxiliary=settings.auxiliary,
            objective=objective.described,
            **spec.common,
        )
        defence.among(policy.least_cohort, refused=0)
        self.server = Server(model, method, policy, optimizer=server_optimizer, defence=defence)
        if buffers := buffers_in_words(self.server.model):
            LOGGER.info("%s", buffers)
        if words := method.other_fraction(spec.fraction):
            LOGGER.warning("%s", words)
        self.history: list[RoundRecord] = []
        schedulers = each("scheduler", scheduler, count)
        kinds = [by_kind[id(make)] for make in makers]
        loaders = in_dtype(clients, inputs_like(model).dtype)
        own = [Own(*one) for one in zip(loaders, tasks, makers, schedulers, kinds, trials.shares, strict=True)]
        # A copy, since the server's own model changes during the run.
        common = Clients(copied(self.server.model), method, where, own, schedule, spec.seed, [*model.parameters()])
        self._transport = LocalTransport(self.server, common, self.tests, spec.workers, spec.engine == VECTORISED)
        self._newest = Newest(self.server.shared.tensors())
        self._last: Round | None = None  # the last finished round, of this run or an earlier one
        self._resumed: FederationState | None = None
        self._decides = {
            "method": method.name,
            "the network": self.server.shared.signature,
            "the number of clients": str(count),
            "local_epochs": str(local_epochs),
            "objective": repr(objective),
            "defence": repr(defence),
            "clip": spec.clip,
            **{name: str(value) for name, value in spec.common.items()},
        }

    @property
    def method(self) -> Method:
        """Return the method of the run."""
        return self.server.method

    @property
    def model(self) -> nn.Module:
        """Return a copy of the shared network as evaluated last, in evaluation mode.

        In a round without an evaluation, it is the network after this round, but
        under HBN and static BN, which measure statistics only before an evaluation,
        the last evaluated one. Its layers are those that the method trains, such as
        group normalisation for gn.
        """
        return self._transport.model(self._newest.tensors, batches_trained(self.history))

    def client_model(self, client: int) -> nn.Module:
        """Return a client's network (from 0): shared tensors as evaluated last, and its own ones.

        Raises:
            ValueError: There is no client of this number.
        """
        fits = isinstance(client, Integral) and not isinstance(client, bool) and 0 <= client < len(self.clients)
        refuse((not fits, f"client must be a client's number, 0..{len(self.clients) - 1}, but got client_model({client!r})"))
        return self._transport.with_own(self.model, client)

    def save(self, path: str | Path) -> None:
        """Save the shared model as evaluated last to a safetensors file. A missing folder is made.

        The file has the unconverted network's names, without tensors that clients
        keep. docs/how-to/export.md says which network can load each method's file.
        """
        save_network(Path(path), self.server.shared.whole(self._newest.tensors, batches_trained(self.history)))

    def run(self, rounds: int) -> Iterator[RoundRecord]:
        """Train for ``rounds`` rounds, and yield records: loss, evaluation, drift of statistics.

        This is a generator: a round runs when its record is requested. A second
        call is a new run from the present model, with the learning rates, phases,
        cohorts and order of ``SeededBatches`` of round 1.

        Args:
            rounds: The number of rounds; 0: the statistics are measured, for
                ``model``, and no record is yielded.

        Raises:
            Diverged: In three rounds in a row, too few replies could be used.
            TooFewMeasured: In a run of 0 rounds, too few clients measured.
            ValueError: ``rounds`` is no whole number >= 0, gradients are off, or a
                run that continues (``resume``) has another number of rounds.
        """
        callbacks, (first, failed) = Callbacks(self.callbacks), self._start(rounds)
        shared = self.server.shared
        if self._last is not None and first == 1:
            shared.load(self._last.tensors)  # the server may hold the statistics of the last evaluation
        running = Running(self.task, lambda: shared.whole(self._newest.tensors, batches_trained(self.history)), self._of_clients)
        if first == 1:
            self._newest, self.server.optimizer = Newest(self._newest.tensors), self.server.optimizer.fresh()
        running.history = tuple(self.history[-(first - 1) :]) if first > 1 else ()

        def show(seen: Measured) -> None:
            self._newest.take(0, seen.tensors)

        try:
            callbacks.on_start(running)
            with self._transport.serving(rounds, first):
                for one in run(self.server, self._transport, rounds, None, first, failed, running.history, show):
                    self._newest.take(one.record.round, one.evaluated)
                    self._last = one
                    self.history.append(one.record)
                    callbacks.on_round(one.record, rounds)
                    yield one.record
                    if running.reason:
                        LOGGER.info("the run ends after round %s of %s: %s", one.record.round, rounds, running.reason)
                        self._newest.say(self.method)
                        break
        except BaseException as error:
            self._newest.say(self.method)
            callbacks.on_end(None if isinstance(error, GeneratorExit) else error)  # the caller stopped iterating
            raise
        callbacks.on_end(None)

    def checkpoint(self, path: str | Path) -> None:
        """Save the federation as it is after its last round, for ``resume``.

        The safetensors file has all tensors, the server optimiser's buffers, the
        records, and the states of random generators. Loading it cannot run code.

        Raises:
            ValueError: No round was run yet.
            OSError: The file cannot be written.
        """
        if self._last is None:
            raise ValueError("a checkpoint needs a finished round, but there is none yet: call checkpoint after round 1 of run(rounds)")
        server, rounds = self.server, self.server.rounds
        own = [[one.get_state() for one in generators(loader)] for loader in self.clients]
        state = FederationState(
            self._last.record.round,
            rounds,
            self._last.failed,
            self._decided(rounds),
            self._last.tensors,
            self._newest.tensors,
            server.optimizer.buffers(),
            server.shared.auxiliary_tensors(),
            self._transport.kept,
            own,
            self.history,
            global_generators(),
        )
        state.save(Path(path))

    def resume(self, path: str | Path) -> None:
        """Load what ``checkpoint`` saved, into a federation made with the same arguments.

        ``run(rounds)``, with the same number, then continues after the saved round;
        it yields nothing if the saved run was over. Another number begins a new run
        after one that was over. On the CPU the results are bit for bit those without
        interruption, if every loader is ``SeededBatches`` or has its own generator.

        Raises:
            ValueError: The file is damaged, or was saved with another network,
                method, number of clients, seed, schedule, or other options.
                Functions, optimizers, and options of the method that only the
                server uses are not compared.
            OSError: The file cannot be read.
        """
        state, server = FederationState.load(Path(path)), self.server
        check_same(path, state.decides, self._decided(state.rounds))
        own = [generators(loader) for loader in self.clients]
        refuse(
            ([len(of) for of in own] != [len(of) for of in state.loaders],
             f"{path} is of another federation, whose loaders had other numbers of random generators (torch.Generator): make the "
             "federation with loaders of the same kind as in the saved run"),
        )  # fmt: skip
        server.shared.restore(state.arrays, state.auxiliary)
        server.optimizer.restore(state.optimizer)
        server.round, server.rounds = state.round, state.rounds
        for of, states in zip(own, state.loaders, strict=True):
            for one, saved in zip(of, states, strict=True):
                one.set_state(saved)
        self._transport.kept, self.history = list(state.clients), list(state.history)
        at = next((round for round in range(state.round, 0, -1) if server.policy.due(round, state.rounds)), 0)
        self._newest = Newest(state.evaluated, at, state.round)
        self._last = Round(self.history[-1], state.arrays, state.evaluated, state.failed)
        self._resumed = state

    def _start(self, rounds: int) -> tuple[int, int]:
        """Return a new or resumed run's first round, and the failed rounds just before it."""
        state, self._resumed = self._resumed, None
        refuse(
            (type(rounds) is not int or rounds < 0, f"rounds must be a whole number >= 0, but got run({rounds!r})"),
            (rounds and not torch.is_grad_enabled(),
             "run trains, but gradients are off here: call it outside of torch.no_grad() and torch.inference_mode()"),
        )  # fmt: skip
        if rounds == 0 and (reason := Passes(self.server).why_idle()):
            raise ValueError(reason)
        if state is None:
            return 1, 0
        if state.round >= state.rounds != rounds:
            LOGGER.info("the saved run of %s rounds is over: run(%s) starts a new run from the saved model", state.rounds, rounds)
            return 1, 0
        if rounds != state.rounds:
            self._resumed = state
            raise ValueError(
                f"the checkpoint is of round {state.round} of {state.rounds}, and learning rates and phases depend on the number of "
                f"rounds: expected run({state.rounds}), but got run({rounds})"
            )
        if self.server.shared.statistics() and Passes(self.server).rescales(rounds):
            self.server.shared.was_at_unit_scale()
        set_generators(state.generators)
        return state.round + 1, state.failed

    def _decided(self, rounds: int) -> dict[str, str]:
        """Return the settings that a continuing run must share, as text by name."""
        method, policy = self.server.method, self.server.policy
        every = [(method.phase(n, rounds).value, policy.scheduled(n, rounds)) for n in range(1, rounds + 1)]
        return self._decides | {"calendar": hashlib.sha256(repr(every).encode()).hexdigest()[:16]}  # of phases and learning rates

    def _of_clients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return client -> its network's state_dict; empty if clients keep no tensors."""
        if not self.server.shared.personal:
            return {}
        return {client: self._transport.with_own(self.model, client).state_dict() for client in range(len(self.clients))}

    def evaluate(self, batches: Loader | PerClient | None = None) -> dict[str, float]:
        """Compute loss and metrics of the shared model as evaluated last; empty without batches.

        If clients have models, tasks or test batches of their own, the result is
        the mean over clients, weighted by their test samples. If clients keep
        tensors (FedBN, SiloBN), the own models of those that have trained are
        evaluated, or the shared model before any has.

        Args:
            batches: The batches to evaluate on, or ``per_client(...)``. Default:
                ``test``.

        Raises:
            ValueError: No client has a test batch, or ``batches`` has single
                samples.
        """
        dtype = inputs_like(self.server.model).dtype
        tests = self.tests if batches is None else own_tests(batches, len(self.clients), dtype, again=self.method.personal)
        for number, (loader, own) in enumerate(zip(tests or (), self._transport.clients.own, strict=False)):
            check_not_one_batch(f"batches of client {number}", loader, own.task)
        return {} if tests is None else self._transport.evaluate_on(tests, self.model)[0]
