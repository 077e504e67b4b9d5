"""Run all clients in this process: one by one, in worker processes, or as one program."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import torch
from torch import nn

from fl_bn.derived import copied, load_tensors
from fl_bn.exchange import local as turns
from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.exchange.session import Session, exchanged_layers
from fl_bn.federation.client_round import Member, Result, client_rounds
from fl_bn.federation.engines.clients import LEFT_OUT, Clients, Connect, LoaderSource
from fl_bn.federation.engines.pace import Pace
from fl_bn.federation.engines.processes import InWorkers, can_move, in_workers
from fl_bn.federation.engines.vectorised import AT_ONCE, AsOneProgram, CannotVectorise, Fallback, unneeded
from fl_bn.federation.engines.workers import cores
from fl_bn.federation.loaders import REITERABLE, Loader, SeededBatches
from fl_bn.federation.local import evaluate
from fl_bn.federation.network import Network
from fl_bn.federation.one_sample import ADVICE
from fl_bn.federation.payload import Named
from fl_bn.federation.replies import checked
from fl_bn.federation.server import Server
from fl_bn.federation.transport import Transport
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply, RoundReplies
from fl_bn.methods import Phase

LOGGER = logging.getLogger("flwr")


class LocalTransport(Transport):
    """Reach all clients of a federation in this process.

    Args:
        server: The federation's server.
        clients: What the clients have in common, and their loaders.
        test: The batches to evaluate on; None: there is no evaluation.
        workers: The number of processes that compute; 1: this process alone. 0: this process, and one process
            per core once they are worth it.
        one_program: Whether clients are computed as one program if possible.
    """

    def __init__(self, server: Server, clients: Clients, test: Loader | None, workers: int = 1, one_program: bool = False) -> None:
        self.server, self.clients, self._test, self._count, self._one_program = server, clients, test, workers, one_program
        self.kept = [NOTHING for _ in clients.loaders]
        self._rounds = 1  # of the run
        self._workers: InWorkers | None = None
        self._pace = Pace(1, 1)
        self._warned, self._fallback = set[int](), Fallback()
        self._on_cpu = Network(clients.model, clients.method, torch.device("cpu"))

    @contextmanager
    def serving(self, rounds: int) -> Iterator[None]:
        """Serve a run of ``rounds`` rounds in this block, with worker processes if there are several."""
        self._rounds = rounds
        self.kept = [replace(kept, round=0) for kept in self.kept]  # from before round 1 of this run
        decides = self._count == 0 and not self._one_program and can_move(self.clients)
        self._pace = Pace(cores() // torch.get_num_threads() if decides else 1, rounds)
        with ExitStack() as self._serving:
            if self._count > 1:
                self._start_workers(self._count)
            try:
                yield
            finally:
                self._workers = None

    def _start_workers(self, count: int) -> None:
        self._workers = self._serving.enter_context(in_workers(self.clients, count))

    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the round's cohort train."""
        cohort, session = self.cohort(instruction.round), None
        if instruction.phase is not Phase.EXCHANGE:
            if self._workers is None and self._pace.worth_it(instruction.round):
                self._start_workers(self._pace.workers)
            begin = time.perf_counter()
            replies = self._in_parts(instruction, cohort)
            self._pace.note(instruction.round, time.perf_counter() - begin)
        elif (together := self._together(instruction, cohort)) is not None:
            replies = together
        else:
            replies, session = self._exchange(instruction, cohort)
        return self._checked(replies, instruction, session)

    def measure(self, instruction: Instruction) -> RoundReplies:
        """Let clients measure: all of them, or the round's cohort, as the method requires."""
        everyone = self._measuring(instruction)
        return self._checked(self._in_parts(instruction, everyone), instruction, None, everyone)

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Let clients measure by one forward pass each.

        Returns:
            The checked replies; None if the clients are too many, or their networks have no order of layers.
        """
        everyone = self._measuring(instruction)
        if self._one_program or turns.too_many(len(everyone), self.clients.model):
            return None  # one program measures all clients at once
        try:
            replies, session = self._exchange(replace(instruction, memory=self.server.policy.memory // len(everyone)), everyone)
        except ExchangeFailed as error:
            LOGGER.warning("%s. Statistics are measured by passes instead", error)
            return None
        finally:
            self.clients.network.keep(self._cohort_size)  # everyone had a copy at once, and training takes less
        if len(session.taking_part) < len(everyone):
            return None
        return self._checked(replies, instruction, session, everyone)

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate on the test batches, if there are any."""
        return {} if self._test is None else self.evaluate_on(self._test, self.model(tensors))

    def evaluate_on(self, batches: Loader, model: nn.Module) -> dict[str, float]:
        """Compute loss and metrics of ``model`` on ``batches``.

        If clients have models of their own, the result is the mean over those that have trained.
        """
        task, device = self.clients.task, self.clients.device
        trained = [client for client, kept in enumerate(self.kept) if kept.get("local")]
        if not (self.server.shared.personal and trained):
            return evaluate(model.to(device), batches, task=task).result()
        results = [evaluate(self.with_own(model, client).to(device), batches, task=task).result() for client in trained]
        return {name: float(np.mean([result[name] for result in results])) for name in results[0]}

    def model(self, tensors: Named, batches: int = 0) -> nn.Module:
        """Return a copy of the shared network in evaluation mode.

        Args:
            tensors: Name -> shared tensor.
            batches: The number of batches that BatchNorm's counters add.
        """
        model = copied(self.server.model)
        load_tensors(model, {**self.server.shared.counters(batches), **tensors})
        return model.eval()

    def with_own(self, model: nn.Module, client: int) -> nn.Module:
        """Return a copy of ``model`` with the tensors that ``client`` keeps."""
        own = copied(model)
        load_tensors(own, self.kept[client].get("local"))
        return own

    def finish_round(self, number: int, changed: bool) -> None:
        """Note in the state of each client of the cohort whether its reply counted."""
        counted = {client.client for client in self.server.record.accepted if changed}
        for client in self.cohort(number):
            self.kept[client] = replace(self.kept[client], counted=client in counted)

    def cohort(self, number: int) -> list[int]:
        """Return the clients of round ``number``, in order; the seed decides."""
        everyone = range(len(self.clients.loaders))
        return sorted(Random(f"{self.clients.seed}/{number}").sample(everyone, self._cohort_size))

    @property
    def _cohort_size(self) -> int:
        return max(1, int(self.server.policy.fraction * len(self.clients.loaders) + 0.5))

    def _measuring(self, instruction: Instruction) -> Sequence[int]:
        by_cohort = self.server.method.measures_cohort(instruction.round)
        return self.cohort(instruction.round) if by_cohort else range(len(self.clients.loaders))

    def _checked(
        self, replies: Sequence[Reply], instruction: Instruction, session: Session | None, cohort: Sequence[int] | None = None
    ) -> RoundReplies:
        expected = self.server.expects(instruction.round, instruction.phase)
        return checked(replies, expected, self.server.policy.clients, session, cohort)

    def _in_parts(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply]:
        """Compute the replies of ``clients``, if possible as one program of ``AT_ONCE`` clients at a time."""
        parts = [clients[begin : begin + AT_ONCE] for begin in range(0, len(clients), AT_ONCE)]
        return [reply for part in parts for reply in self._together(instruction, part) or self._one_by_one(instruction, part)]

    def _one_by_one(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply]:
        if self._workers is None:
            return [self._compute(instruction, client) for client in clients]
        results = self._workers.work(instruction, self._rounds, clients, [self.kept[client] for client in clients])
        return [self._keep(instruction, client, *result) for client, result in zip(clients, results, strict=True)]

    def _compute(self, instruction: Instruction, client: int, connect: Connect | None = None) -> Reply:
        return self._keep(instruction, client, *self.clients.compute(instruction, self._rounds, client, self.kept[client], connect))

    def _keep(self, instruction: Instruction, client: int, reply: Reply, kept: ClientState) -> Reply:
        if instruction.trains:
            self.kept[client] = kept
            self._warn_of(instruction.round, client, reply)
        return reply

    def _warn_of(self, round: int, client: int, reply: Reply) -> None:
        """Warn, once per client, of batches that it could not train on, or of a loader that gave none."""
        left_out = int(reply.metrics.get(LEFT_OUT, 0))
        if client in self._warned or (reply.samples and not left_out):
            return
        self._warned.add(client)
        if left_out:
            what = "a batch" if left_out == 1 else f"{left_out} batches"
            LOGGER.warning("client %s: %s of one sample left out in round %s. %s", client, what, round, ADVICE)
        else:
            LOGGER.warning("client %s: its loader gave no batch in round %s. %s", client, round, REITERABLE)

    def _together(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply] | None:
        """Compute the replies of ``clients`` as one program; None if they must be computed one by one."""
        if not self._one_program:
            return None
        try:
            results = self._as_one_program(instruction, clients)
        except CannotVectorise as reason:
            self._fallback.say(reason)
            return None
        if instruction.trains:
            for client, (_, kept) in zip(clients, results, strict=True):
                self.kept[client] = kept
        return [reply for reply, _ in results]

    def _as_one_program(self, instruction: Instruction, clients: Sequence[int]) -> list[Result]:
        loaders = [self.clients.loaders[client] for client in clients]
        if not all(isinstance(loader, SeededBatches) for loader in loaders):
            raise CannotVectorise("one program must draw the batches itself: give SeededBatches")
        sources = [LoaderSource(self.clients, client, self._rounds) for client in clients]
        if any(len(source.samples) < 2 for source in sources):
            raise CannotVectorise("the batches of one program need at least 2 samples per client, but a client has fewer")
        exchanges = instruction.phase is Phase.EXCHANGE
        if exchanges and self.server.defence.active:
            raise CannotVectorise(f"{self.server.method.name} with a defence averages robustly within a step, which one program cannot")
        with ExitStack() as returned:
            lent = [returned.enter_context(self._on_cpu.lend()) for _ in clients]
            connect = unneeded if exchanges else None
            rounds = [
                self.clients.round(one, instruction, self.kept[client], connect) for one, client in zip(lent, clients, strict=True)
            ]
            members = [Member(round, source) for round, source in zip(rounds, sources, strict=True)]
            return client_rounds(members, AsOneProgram(self.clients.device))

    def _exchange(self, instruction: Instruction, clients: Sequence[int]) -> tuple[list[Reply], Session]:
        """Compute the replies of ``clients``, who exchange layer by layer, and the session of their exchange."""
        defence = self.server.defence
        session = Session(clients, exchanged_layers(self.server.model), average=defence.average, believing=not defence.active)
        return _in_turns(session, clients, partial(self._compute, instruction)), session


def _in_turns(session: Session, clients: Sequence[int], work: Callable[[int, Callable[[int], LocalExchange]], Reply]) -> list[Reply]:
    """Call ``work(client, connect)`` for all ``clients``, who exchange in ``session``."""
    tokens = turns.admit(session)

    def one(client: int) -> Reply:
        try:
            reply = work(client, partial(LocalExchange, tokens[client]))
        except BaseException as error:
            turns.end_task(tokens[client], repr(error))
            raise
        turns.end_task(tokens[client], "")
        return reply

    try:
        return Turns(len(clients)).run([partial(one, client) for client in clients])
    finally:
        turns.dismiss(tokens)
