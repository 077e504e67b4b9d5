"""A whole federation in this process, in plain torch: no Flower, no config, no files unless asked for."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_bn.derived import copied, load_tensors
from fl_bn.exchange import local as turns
from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.exchange.session import Session, exchanged_layers
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.callbacks import Callback, Callbacks
from fl_bn.federation.client import LocalRound, check_optimizer
from fl_bn.federation.clients import LEFT_OUT, Clients, Connect, InWorkers, in_workers
from fl_bn.federation.clipping import chosen
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence, TooFew
from fl_bn.federation.eager import SGD
from fl_bn.federation.loaders import REITERABLE, Loader, SeededBatches, check_loader
from fl_bn.federation.local import evaluate
from fl_bn.federation.network import Network
from fl_bn.federation.one_sample import ADVICE
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Exchanged, Passes
from fl_bn.federation.payload import Named
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.rounds import AS_METHOD, Rounds, constant_rate
from fl_bn.federation.server import Server, check_learns
from fl_bn.federation.settings import LEARNING_RATE, LocalTraining
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply
from fl_bn.federation.vectorised import (
    AT_ONCE,
    ENGINES,
    VECTORISED,
    CannotVectorise,
    Fallback,
    check_cohort,
    measure_together,
    reply_of,
    train_together,
    unneeded,
)
from fl_bn.federation.workers import MOST_WORKERS
from fl_bn.methods import Method, Phase, Refresh, Report
from fl_bn.objectives import PLAIN, Objective
from fl_bn.roles import buffers_in_words, inputs_like
from fl_bn.support.names import check_name
from fl_bn.task import CLASSIFICATION, Task

LOGGER = logging.getLogger("flwr")
SGD_05 = partial(SGD, lr=LEARNING_RATE, momentum=0.9)


class Diverged(RuntimeError):
    """Three rounds in a row no client's reply could be used."""


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
        self.task, self.clients, self.test, self.seed, self.workers = task, clients, test, seed, workers
        self.progress, self.callbacks = progress, tuple(callbacks)
        settings = LocalTraining(batch_size=2, epochs=local_epochs, objective=objective)
        check_composition(method, settings, robust=defence.active)
        check_learns(model)
        example = optimizer(model.parameters())
        check_optimizer(objective, example)
        method, settings = _bounded(method, clip, example, settings)
        self._rate = _rate_of(example)
        policy = Rounds(
            len(clients),
            fraction,
            seed=seed,
            evaluate_every=evaluate_every,
            calibrate=calibrate,
            unit_scale=unit_scale,
            rate=lambda round, rounds: (self._rate or constant_rate(round, rounds)) * schedule(round, rounds),
            auxiliary=auxiliary(settings),
        )
        self.server = Server(model, method, policy, optimizer=server_optimizer, defence=defence)
        if buffers := buffers_in_words(self.server.model):
            LOGGER.info("%s", buffers)
        self.history: list[RoundRecord] = []
        self._device = torch.device(device) if device is not None else inputs_like(model).device
        pristine = copied(self.server.model)  # what the server has changes
        self._clients = Clients(pristine, method, self._device, clients, settings, task, optimizer, scheduler, schedule, seed)
        self._in_workers: InWorkers | None = None
        self._kept = [NOTHING for _ in clients]
        self._without = set[int]()  # clients of whose batches something was said
        self._one_program, self._fallback = engine == VECTORISED, Fallback()
        self._on_cpu = Network(pristine, method, torch.device("cpu"))
        self._passes = Passes(self.server, self._measured, layer_by_layer=self._measured_layer_by_layer)
        self._evaluated: Named = self.server.shared.tensors()

    @property
    def method(self) -> Method:
        return self.server.method

    @property
    def model(self) -> nn.Module:
        """A copy of the shared network as it was evaluated last, in evaluation mode; of methods that keep BatchNorm it is BatchNorm."""
        model = copied(self.server.model)
        counters = self.server.shared.counters(batches_trained(self.history))
        load_tensors(model, {**counters, **self._evaluated})
        return model.eval()

    def client_model(self, client: int) -> nn.Module:
        """The network of one client: the shared tensors as evaluated last, and those of its own."""
        model = self.model
        load_tensors(model, self._kept[client].get("local"))
        return model

    def save(self, path: str | Path) -> None:
        """The shared model as evaluated last, as safetensors, by the names of the unconverted network's state_dict: all of it, but for
        tensors that the clients keep. Which methods' files load into which network: docs/how-to/export.md."""
        save_file(self.server.shared.whole(self._evaluated, batches_trained(self.history)), str(path))

    def run(self, rounds: int) -> Iterator[RoundRecord]:
        """Train for ``rounds`` rounds, and yield each one's record: loss, evaluation, how far the statistics moved.

        A generator: a round runs when its record is asked for. Called once more, it trains on from the model as it is.

        Raises:
            Diverged: three rounds in a row no reply could be used.
        """
        callbacks = Callbacks([*self._bar(), *self.callbacks])
        try:
            yield from self._run(rounds, callbacks)
        except BaseException as error:
            callbacks.on_end(None if isinstance(error, GeneratorExit) else error)  # who asks for no more has what they wanted
            raise
        callbacks.on_end(None)

    def _run(self, rounds: int, callbacks: Callbacks) -> Iterator[RoundRecord]:
        server, failed = self.server, 0
        server.rounds = self._clients.rounds = rounds
        self._kept = [replace(kept, round=0) for kept in self._kept]  # from before round 1 of this run
        with self._processes():
            tensors = server.shared.tensors()
            if server.shared.statistics():
                tensors = dict(self._passes.calibrated(tensors, rounds))
            for number in range(1, rounds + 1):
                begin = time.perf_counter()
                server.shared.load(tensors)
                asked, cohort = server.begin(number), self._cohort(number)
                replies, session = self._train(asked, cohort)
                came = server.checked(replies, asked)
                came.exchange, came.carrier = session, "local"
                failed = 0 if server.conclude(came) else failed + 1
                record, tensors = server.record, server.shared.tensors()
                counted = {client.client for client in record.accepted if record.aggregated}
                for client in cohort:
                    self._kept[client] = replace(self._kept[client], counted=client in counted)
                self._evaluated = tensors
                if number % server.policy.evaluate_every == 0 or number == rounds:
                    if self.method.refresh is not Refresh.NOTHING and asked.phase is not Phase.FROZEN:
                        self._evaluated = dict(self._passes.refreshed(number, tensors))
                        server.record = record
                    record.evaluation = self.evaluate()
                record.seconds = time.perf_counter() - begin
                self.history.append(record)
                callbacks.on_round(record, rounds)
                yield record
                if failed == server.policy.max_failed:
                    why = next((client.refused for client in record.clients if client.refused), "")
                    lower = ". Training diverged: lower the learning rate" if "finite" in why else ""
                    raise Diverged(f"{failed} rounds in a row too few replies could be used. The first reason: {why}{lower}")

    def _bar(self) -> list[Callback]:
        """On a terminal, where it is wanted."""
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
        if batches is None:
            return {}
        trained = [client for client, kept in enumerate(self._kept) if kept.get("local")]
        if not (self.server.shared.personal and trained):
            return evaluate(self.model.to(self._device), batches, task=self.task).result()
        found = [evaluate(self.client_model(client).to(self._device), batches, task=self.task).result() for client in trained]
        return {name: float(np.mean([metrics[name] for metrics in found])) for name in found[0]}

    def _cohort(self, number: int) -> list[int]:
        return sorted(Random(f"{self.seed}/{number}").sample(range(len(self.clients)), self._cohort_size))

    @property
    def _cohort_size(self) -> int:
        return max(1, int(self.server.policy.fraction * len(self.clients) + 0.5))

    def _train(self, asked: Instruction, cohort: Sequence[int]) -> tuple[list[Reply], Session | None]:
        """The cohort's replies, and the session through which it exchanged, if any."""
        if asked.phase is not Phase.EXCHANGE:
            parts = [cohort[begin : begin + AT_ONCE] for begin in range(0, len(cohort), AT_ONCE)]
            return [reply for part in parts for reply in self._together(asked, part) or self._one_by_one(asked, part)], None
        if (replies := self._together(asked, cohort)) is not None:
            return replies, None
        session = self._session(cohort)
        return _in_turns(session, cohort, partial(self._client, asked)), session

    @contextmanager
    def _processes(self) -> Iterator[None]:
        """Worker processes for the block, where they are wanted."""
        if self.workers == 1:
            yield
            return
        with in_workers(self._clients, self.workers) as self._in_workers:
            try:
                yield
            finally:
                self._in_workers = None

    def _one_by_one(self, asked: Instruction, clients: Sequence[int]) -> list[Reply]:
        """The replies of ``clients``, each computed alone, here or in worker processes."""
        if self._in_workers is None:
            return [self._client(asked, client) for client in clients]
        replies = []
        done = self._in_workers.work(asked, clients, [self._kept[client] for client in clients])
        for client, (reply, kept) in zip(clients, done, strict=True):
            replies.append(self._keeping(asked, client, reply, kept))
        return replies

    def _client(self, asked: Instruction, client: int, connect: Connect | None = None) -> Reply:
        work = self._clients.measure if asked.phase is Phase.MEASURE else self._clients.train
        return self._keeping(asked, client, *work(asked, client, self._kept[client], connect))

    def _keeping(self, asked: Instruction, client: int, reply: Reply, kept: ClientState) -> Reply:
        if asked.phase is not Phase.MEASURE:
            self._kept[client] = kept
            self._say_left_out(asked.round, client, reply)
        return reply

    def _say_left_out(self, round: int, client: int, reply: Reply) -> None:
        """Warn, once for each client, of batches that it could not train on, or of a loader that gave none."""
        left_out = int(reply.metrics.get(LEFT_OUT, 0))
        if client in self._without or (reply.samples and not left_out):
            return
        self._without.add(client)
        if left_out:
            what = "a batch" if left_out == 1 else f"{left_out} batches"
            LOGGER.warning("client %s: %s of one sample left out in round %s. %s", client, what, round, ADVICE)
        else:
            LOGGER.warning("client %s: its loader gave no batch in round %s. %s", client, round, REITERABLE)

    def _together(self, asked: Instruction, clients: Sequence[int]) -> list[Reply] | None:
        """The replies of ``clients`` as one program; None where they are to work, or have to work, one by one."""
        if not self._one_program:
            return None
        try:
            results = self._cohort_round(asked, clients)
        except CannotVectorise as reason:
            self._fallback.say(reason)
            return None
        for client, (_, kept) in zip(clients, results, strict=True):
            self._kept[client] = kept
        return [reply for reply, _ in results]

    def _cohort_round(self, asked: Instruction, clients: Sequence[int]) -> list[tuple[Reply, ClientState]]:
        loaders = [loader for loader in map(self.clients.__getitem__, clients) if isinstance(loader, SeededBatches)]
        if len(loaders) < len(clients):
            raise CannotVectorise("its clients need batches that it draws itself: give SeededBatches")
        if any(len(loader.samples) < 2 for loader in loaders):
            raise CannotVectorise("batches of one program need at least 2 samples, but a client has fewer")
        exchanges = asked.phase is Phase.EXCHANGE
        if exchanges and self.server.defence.active:
            raise CannotVectorise(f"{self.method.name} with a defence averages robustly within a step")
        connect = unneeded if exchanges else None
        with ExitStack() as returned:
            lent = [returned.enter_context(self._on_cpu.lend()) for _ in clients]
            rounds = [
                LocalRound(one, self.method, asked, self._kept[client], self._clients.settings, connect)
                for one, client in zip(lent, clients, strict=True)
            ]
            return self._replies(rounds, loaders, clients)

    def _replies(
        self, rounds: Sequence[LocalRound], loaders: Sequence[SeededBatches], clients: Sequence[int]
    ) -> list[tuple[Reply, ClientState]]:
        """Replies of clients that are computed as one program; only its stack is on the device."""
        asked = rounds[0].instruction
        check_cohort(rounds, [loader.samples for loader in loaders], self.task)
        if self.method.reports(asked.phase) is Report.PASS:
            inputs = [round.inputs(loader, self.task) for round, loader in zip(rounds, loaders, strict=True)]
            measure_together(rounds, inputs, self.task.forward, self._device)
        if asked.phase is Phase.MEASURE:
            return [round.reply(round.measured_samples, client=client) for round, client in zip(rounds, clients, strict=True)]
        batches = [own.epochs(self.seed, client, asked.round, self._clients.epochs) for own, client in zip(loaders, clients, strict=True)]
        make = partial(self._clients.optimizer, asked=asked)
        trained = train_together(rounds, batches, self.task, make, self._clients.make_scheduler, self._device)
        told = zip(rounds, [len(loader.samples) for loader in loaders], [part.loss for part in trained], clients, strict=True)
        return [reply_of(*one) for one in told]

    def _measured(self, asked: Instruction) -> Exchanged:
        who, parts = self._to_measure(asked), list[Reply]()
        for begin in range(0, len(who), AT_ONCE):
            parts += self._measure(asked, who[begin : begin + AT_ONCE])
        return self._stored(asked, parts)

    def _to_measure(self, asked: Instruction) -> Sequence[int]:
        return self._cohort(asked.round) if self.method.measures_cohort(asked.round) else range(len(self.clients))

    def _measure(self, asked: Instruction, clients: Sequence[int]) -> list[Reply]:
        if (replies := self._together(asked, clients)) is not None:
            return replies
        return self._one_by_one(asked, clients)

    def _measured_layer_by_layer(self, asked: Instruction) -> Exchanged | None:
        """The same by one forward pass of each client; None where they are too many, or their networks have no order of layers."""
        everyone = self._to_measure(asked)
        if self._one_program:
            return None  # which measures all clients at once
        if turns.too_many(len(everyone), self._clients.model):
            return None
        session, asked = self._session(everyone), replace(asked, memory=self.server.policy.memory // len(everyone))
        try:
            parts = _in_turns(session, everyone, partial(self._client, asked))
        except ExchangeFailed as error:
            LOGGER.warning("%s. Statistics are measured by passes instead", error)
            return None
        finally:
            self._clients.network.keep(self._cohort_size)  # everyone had a copy at once, and training takes less
        if len(session.taking_part) < len(everyone):
            return None
        return replace(self._stored(asked, parts), session=session, carrier="local")

    def _stored(self, asked: Instruction, parts: Sequence[Reply]) -> Exchanged:
        came, everyone = self.server.checked(parts, asked), self._to_measure(asked)
        try:
            used, overflowing = self.server.measured(came.parts, len(came.wrong), asked.measured)
        except TooFew as error:
            LOGGER.warning("the statistics stay as they are, since %s", error)
            return Exchanged(everyone, came.parts, came.refused, 0)
        return Exchanged(everyone, used, came.refused | overflowing, len(used))

    def _session(self, cohort: Sequence[int]) -> Session:
        defence = self.server.defence
        return Session(cohort, exchanged_layers(self.server.model), average=defence.average, believing=not defence.active)


def _in_turns(session: Session, clients: Sequence[int], work: Callable[[int, Callable[[int], LocalExchange]], Reply]) -> list[Reply]:
    """``work(client, connect)`` of all clients, who meet in ``session``."""
    tokens = turns.admit(session)

    def one(client: int) -> Reply:
        try:
            reply = work(client, partial(LocalExchange, tokens[client]))
        except BaseException as error:
            turns.ended(tokens[client], repr(error))
            raise
        turns.ended(tokens[client], "")
        return reply

    try:
        return Turns(len(clients)).run([partial(one, client) for client in clients])
    finally:
        turns.dismiss(tokens)


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
