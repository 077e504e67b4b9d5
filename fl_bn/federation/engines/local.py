"""Run all clients on this machine: one by one, in workers, or in one vectorised program."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random

import torch
from torch import nn

from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.exchange import local as turns
from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.local import LocalExchange, Turns
from fl_bn.exchange.session import Session
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import Result
from fl_bn.federation.engines.clients import CannotMove, Clients, Connect, InWorkers, LoaderLoop
from fl_bn.federation.engines.vectorised import AT_ONCE, CannotVectorise, Fallback, client_rounds
from fl_bn.federation.engines.workers import WorkerTiming, cores
from fl_bn.federation.loaders import Loader, SeededBatches, described
from fl_bn.federation.local import evaluate, unmoved
from fl_bn.federation.network import Network
from fl_bn.federation.policy import MEMORY
from fl_bn.federation.record import over_samples
from fl_bn.federation.replies import checked
from fl_bn.federation.server import Server, Transport
from fl_bn.federation.training import LEFT_OUT
from fl_bn.federation.values import NOTHING, Instruction, Named, Reply, RoundReplies
from fl_bn.methods import Phase
from fl_bn.support.names import noted
from fl_bn.task import MetricState

LOGGER = logging.getLogger("flwr")


class LocalTransport(Transport):
    """Reach all clients of a ``Federation``, which run on this machine.

    Args:
        workers: The number of processes that compute clients. 0: this process, and
            worker processes once they save time (``WorkerTiming``).
        one_program: Whether a vectorised program computes clients together, if
            possible.
    """

    def __init__(
        self, server: Server, clients: Clients, tests: Sequence[Loader] | None, workers: int = 1, one_program: bool = False
    ) -> None:
        self.server, self.clients, self._tests, self._count, self._one_program = server, clients, tests, workers, one_program
        self.kept = [NOTHING for _ in clients.own]
        self._rounds = 1  # the number of rounds of the run
        self._workers: InWorkers | None = None
        self._timing = WorkerTiming(1, 1)
        self._warned, self._fallback = set[int](), Fallback()
        self._on_cpu = Network(clients.model, clients.method, torch.device("cpu"))

    @contextmanager
    def serving(self, rounds: int, first: int = 1) -> Iterator[None]:
        """Prepare for ``rounds`` rounds in the block, perhaps with worker processes."""
        self._rounds = rounds
        if first == 1:
            self.kept = [replace(kept, round=0) for kept in self.kept]  # the state of an earlier run counts as from before round 1
        decides = self._count == 0 and not self._one_program and self.clients.device.type == "cpu"
        self._timing = WorkerTiming(cores() // torch.get_num_threads() if decides else 1, rounds)
        with ExitStack() as self._serving:
            if self._count > 1:
                self._start_workers(self._count)
            try:
                yield
            finally:
                self._workers = None

    def _start_workers(self, count: int) -> None:
        self._workers = workers = InWorkers(self.clients, count)
        self._serving.callback(workers.close)

    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the cohort train, and return the checked replies."""
        everyone, session = self.cohort(instruction.round), None
        cohort = [client for client in everyone if client not in self.server.left_out] or everyone
        with self.clients.given_unused():
            if instruction.phase is not Phase.EXCHANGE:
                if self._workers is None and self._timing.worth_it(instruction.round):
                    try:
                        self._start_workers(self._timing.workers)
                    except CannotMove as reason:
                        self._timing = WorkerTiming(1, 1)
                        LOGGER.info("workers=0: the clients stay in one process: %s", reason)
                begin = time.perf_counter()
                replies = self._in_parts(instruction, cohort)
                self._timing.note(instruction.round, time.perf_counter() - begin)
            else:
                if self._one_program:
                    self._fallback.say(CannotVectorise(f"{self.server.method.name} exchanges statistics within a local step"))
                try:
                    replies, session = self._exchange(instruction, cohort)
                except ExchangeFailed as error:  # no step on the union
                    return RoundReplies(cohort, [], dict.fromkeys(cohort, str(error)))
        return self._checked(replies, instruction, session)

    def measure(self, instruction: Instruction) -> RoundReplies:
        """Let all clients or the cohort, as the method requires, measure."""
        everyone = self._measuring(instruction)
        return self._checked(self._in_parts(instruction, everyone), instruction, None, everyone)

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Let clients measure layer by layer, by one forward pass each.

        Return None if there are too many clients, their networks have no fixed
        order of layers, a client left, or one vectorised program computes them.
        """
        everyone = self._measuring(instruction)
        if self._one_program or turns.too_many(len(everyone), self.clients.model):
            return None  # the vectorised program measures all clients at once
        try:
            with unmoved(self.clients.own[client].loader for client in everyone):  # clients may share one, and they take turns
                replies, session = self._exchange(replace(instruction, memory=MEMORY // len(everyone)), everyone)
        except ExchangeFailed as error:
            LOGGER.warning("%s. Statistics are measured by one pass per layer instead", error)
            return None
        finally:
            self.clients.network.keep(self._cohort_size)  # all clients had copies at the same time, and training needs fewer
        if len(session.taking_part) < len(everyone):
            return None
        return self._checked(replies, instruction, session, everyone)

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate on the clients' test batches, if any. Return mean metrics.

        If clients differ in model, task or batches, the record gets each one's
        metrics.
        """
        if self._tests is None:
            return {}
        metrics, by_client = self.evaluate_on(self._tests, self.model(tensors))
        self.server.record = replace(self.server.record, client_evaluation=by_client)
        return metrics

    def evaluate_on(self, tests: Sequence[Loader], model: nn.Module) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
        """Evaluate ``model`` on each client's test batches, by the client's task.

        Return mean metrics, and client -> metrics, empty if all have the same
        model, batches and task. If clients keep tensors (FedBN), those that have
        trained are evaluated with their own models, or all with ``model`` before.

        Raises:
            ValueError: No client has a test batch.
        """
        device, tasks = self.clients.device, [own.task for own in self.clients.own]
        trained = [client for client, kept in enumerate(self.kept) if kept.get("local")]
        personal = self.server.shared.personal and bool(trained)
        states: dict[tuple[int, int], MetricState] = {}
        own = {}
        with unmoved(tests):  # they may be the training batches, too
            for client in trained if personal else range(len(tests)):
                key = id(tests[client]), id(tasks[client])
                with noted("at client {}, in its test batches".format, client):
                    if personal:
                        own[client] = evaluate(self.with_own(model, client).to(device), tests[client], task=tasks[client])
                    else:
                        states[key] = own[client] = states.get(key) or evaluate(model.to(device), tests[client], task=tasks[client])
        if not personal and len(states) == 1 and own[0].sums:
            return own[0].result(), {}
        results = {client: state.result() for client, state in own.items() if state.sums}
        if own and not results:
            raise ValueError("test has no batch: give test batches, or None for no evaluation")
        return over_samples([(own[client].count, result) for client, result in results.items()]), results

    def model(self, tensors: Named, batches: int = 0) -> nn.Module:
        """Return the shared network for evaluation, ``batches`` added to ``num_batches_tracked``."""
        model = copied(self.server.model)
        load_tensors(model, {**self.server.shared.counters(batches), **tensors})
        return model.eval()

    def with_own(self, model: nn.Module, client: int) -> nn.Module:
        """Return a copy of ``model`` with the client's own tensors."""
        own = copied(model)
        load_tensors(own, self.kept[client].get("local"))
        return own

    def finish_round(self, number: int, changed: bool) -> None:
        """Record in the cohort's states whether the server used the replies."""
        counted = {client.client for client in self.server.record.accepted if changed}
        for client in self.cohort(number):
            if self.kept[client].round == number:  # an older state was counted in its own round, or was not
                self.kept[client] = replace(self.kept[client], counted=client in counted)

    def cohort(self, number: int) -> list[int]:
        """Return the clients of round ``number``, drawn by the seed, ascending."""
        everyone = range(len(self.clients.own))
        return sorted(Random(f"{self.clients.seed}/{number}").sample(everyone, self._cohort_size))

    @property
    def _cohort_size(self) -> int:
        return max(1, int(self.server.policy.fraction * len(self.clients.own) + 0.5))

    def _measuring(self, instruction: Instruction) -> Sequence[int]:
        by_cohort = self.server.method.measures_cohort(instruction.round)
        return self.cohort(instruction.round) if by_cohort else range(len(self.clients.own))

    def _checked(
        self, replies: Sequence[Reply], instruction: Instruction, session: Session | None, cohort: Sequence[int] | None = None
    ) -> RoundReplies:
        expected = self.server.expects(instruction.round, instruction.phase)
        return checked(replies, expected, self.server.policy.clients, session, cohort)

    def _in_parts(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply]:
        """Compute replies in groups of ``AT_ONCE``, each together if possible."""
        parts = [clients[begin : begin + AT_ONCE] for begin in range(0, len(clients), AT_ONCE)]
        return [reply for part in parts for reply in self._together(instruction, part) or self._one_by_one(instruction, part)]

    def _one_by_one(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply]:
        if self._workers is None:
            return [self._compute(instruction, client) for client in clients]
        results = self._workers.work(instruction, self._rounds, clients, [self.kept[client] for client in clients])
        return [*map(partial(self._keep, instruction), clients, results)]

    def _compute(self, instruction: Instruction, client: int, connect: Connect | None = None) -> Reply:
        return self._keep(instruction, client, self.clients.compute(instruction, self._rounds, client, self.kept[client], connect))

    def _keep(self, instruction: Instruction, client: int, result: Result) -> Reply:
        reply, kept = result
        if instruction.trains:
            self.kept[client] = kept
            self._warn_of(instruction.round, client, reply)
        return reply

    def _warn_of(self, round: int, client: int, reply: Reply) -> None:
        """Warn once per client of left out batches of one sample, or of no batch."""
        left_out = int(reply.metrics.get(LEFT_OUT, 0))
        if client not in self._warned and (left_out or not reply.samples):
            self._warned.add(client)
            what = f"left out batches of one sample ({left_out}), which has no variance," if left_out else "gave no batch"
            LOGGER.warning("client %s %s in round %s. Its loader: %s", client, what, round, described(self.clients.own[client].loader))

    def _together(self, instruction: Instruction, clients: Sequence[int]) -> list[Reply] | None:
        """Compute replies in one vectorised program; None if it must be one by one."""
        if not self._one_program:
            return None
        try:
            results = self._as_one_program(instruction, clients)
        except CannotVectorise as reason:
            self._fallback.say(reason)
            return None
        return [*map(partial(self._keep, instruction), clients, results)]

    def _as_one_program(self, instruction: Instruction, clients: Sequence[int]) -> list[Result]:
        every = [self.clients.own[client] for client in clients]
        if not all(isinstance(own.loader, SeededBatches) for own in every):
            raise CannotVectorise("the clients' batches must be SeededBatches, but some are not")
        if len({(id(own.task), id(own.make_optimizer), id(own.make_scheduler), own.settings, own.rate_share) for own in every}) > 1:
            raise CannotVectorise("all clients need the same task, loss, optimiser and scheduler")
        with ExitStack() as returned:
            lent, own = [returned.enter_context(self._on_cpu.lend()) for _ in clients], self.clients
            rounds = [
                LocalRound(one, own.method, own.instruction(client, instruction), self.kept[client], own.own[client].settings)
                for one, client in zip(lent, clients, strict=True)
            ]
            return client_rounds(rounds, [LoaderLoop(own, client, self._rounds) for client in clients], self.clients.device)

    def _exchange(self, instruction: Instruction, clients: Sequence[int]) -> tuple[list[Reply], Session]:
        """Let ``clients`` exchange layer by layer. Return replies and session.

        A client runs until it waits for the others or is finished. Then the next
        one runs.
        """
        defence = self.server.defence
        session = Session(clients, self.server.shared.exchanged(), average=defence.average, believing=not defence.active)
        tokens = turns.admit(session)

        def one(client: int) -> Reply:
            try:
                reply = self._compute(instruction, client, partial(LocalExchange, tokens[client]))
            except BaseException as error:
                turns.end_task(tokens[client], repr(error))
                raise
            turns.end_task(tokens[client], "")
            return reply

        try:
            return Turns(len(clients)).run([partial(one, client) for client in clients]), session
        finally:
            turns.dismiss(tokens)
