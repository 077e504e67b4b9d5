"""Carry a run's rounds over a Flower grid: make messages, call hooks, read replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fl_bn.bn.derived import plain_names
from fl_bn.federation.callbacks import Callback, Callbacks, Running
from fl_bn.federation.passes import Newest, Passes
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.schema import instruction as shared_tensors
from fl_bn.federation.server import Server, Transport
from fl_bn.federation.values import Instruction, Named, Payload, RoundReplies, to_numpy
from fl_bn.flower.compat import log
from fl_bn.flower.deployment import submitted
from fl_bn.flower.disclosure import DisclosureReport
from fl_bn.flower.evaluation import Evaluations
from fl_bn.flower.layerwise.exchanges import BY_PASSES, Exchanges
from fl_bn.flower.own_metrics import NamedRates, OwnApp, numbers_of, with_share
from fl_bn.flower.population import Client, KeptTensors, Population, RunFailed
from fl_bn.flower.recovery import Checkpoint, Recovery
from fl_bn.flower.wire.codec import RunId, add_to_config, arrays_of, header_for, tensors_of, to_records
from fl_bn.flower.wire.messages import STATISTICS
from fl_bn.flower.wire.messaging import Decoded, Reading, receive
from fl_bn.methods import Phase
from fl_bn.robust.attacks import LABEL_FLIP
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.wire import WireError, printable
from fl_bn.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds
    from fl_bn.flower.strategy import BatchNormStrategy

CHANGED = "a hook changed the arrays in a way that clients would refuse (%s): return all arrays that it got, with their names and shapes"
Pair = tuple[ArrayRecord | None, MetricRecord | None]


@dataclass
class Round:
    """Hold one training round: its instruction, the replies, and what the hooks returned.

    Attributes:
        before: Shared and auxiliary tensors, the optimiser's buffers and
            ``KeptTensors.counted`` before it.
    """

    before: tuple[Named, Named, Named, dict[int, int]]
    instruction: Instruction
    replies: RoundReplies
    returned: Pair = None, None


@dataclass(repr=False)
class RunResult(Result):
    """Hold Flower's result of a run, and every round's record, with each client's metrics."""

    records: list[RoundRecord] = field(default_factory=list)


class GridTransport(Transport):
    """Run the rounds of one strategy over a Flower grid, for fl-bn's application or a user's ``own_app``.

    ``train`` calls the strategy's hooks ``configure_train`` and
    ``aggregate_train``, whose own code is ``ask_to_train`` and ``combine``.
    ``evaluations`` calls the other two hooks.

    Args:
        evaluate: maps the global model to metrics, at the server.
        callbacks: called at the start, after every round and at the end.
        save_clients: the folder in which clients save models at the end. Empty:
            none do.
        keep_checkpoint: stores a ``Checkpoint``, and returns the oldest round to
            which the run can go back.
        secure: the settings of SecAgg+. None: updates travel in the clear.
    """

    def __init__(
        self,
        server: Server,
        *,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        callbacks: Sequence[Callback] = (),
        save_clients: str = "",
        keep_checkpoint: Callable[[Checkpoint], int] | None = None,
        secure: SecureAggregation | None = None,
        task: Task = CLASSIFICATION,
        own_app: OwnApp | None = None,
    ) -> None:
        rounds, defence = server.policy, server.defence
        self.server, self.shared, self.method, self.policy, self.task = server, server.shared, server.method, rounds, task
        self.own_app, self.save_clients, self.callbacks = own_app, save_clients, Callbacks(callbacks)
        self.running = Running(task, self._arrays)
        self.population: Population | None = None
        self.cohort = list[Client]()
        self.batches_trained = 0  # the number of batches that a client has trained on
        self.disclosures = DisclosureReport(self.shared.model, self.shared.locality, rounds.called)
        layers, shared = self.shared.exchanged(), self.shared
        self.exchanges = Exchanges(rounds.exchange, shared.model, layers, defence.average, not defence.active, rounds.called)
        self.secure: SecureRounds | None = None
        if secure is not None:
            from fl_bn.flower.secagg.rounds import SecureRounds  # imported only now, since a plain run needs no SecAgg+

            self.secure = SecureRounds(secure, self.server, self.disclosures.masked)
        accountant = None if self.secure is None else self.secure.accountant
        self.kept = KeptTensors(self.shared, rounds.called, sends=own_app is not None)
        self.recovery = Recovery(save_clients, self.kept, rounds.checkpoint_every, keep_checkpoint, accountant)
        self.statistics = Passes(self.server, accountant is not None)
        self.evaluations = Evaluations(self, evaluate, None if own_app is None else own_app.metrics)
        self.strategy: BatchNormStrategy | None = None  # whose hooks are called; None: no run goes on
        self._newest: Newest | None = None  # None before ``start``
        self._round: Round | None = None
        self._given: tuple[Mapping[str, Array], Named] = {}, {}  # the last arrays for hooks, and their tensors
        self._expected = shared_tensors(self.shared.model, self.shared.locality)
        self._down = Payload()  # what the last messages carry

    @property
    def record(self) -> RoundRecord:
        """Return the record of the current round, or of the last one."""
        return self.server.record

    def begin(
        self, strategy: BatchNormStrategy, grid: Grid, timeout: float, configs: tuple[ConfigRecord, ConfigRecord], newest: Newest
    ) -> None:
        """Begin a run of ``strategy``, with its configs for training and evaluation."""
        self.strategy, self.grid, self.timeout, self._newest, self.result = strategy, grid, timeout, newest, RunResult()
        (self.train_config, self.evaluate_config), self.running.reason = configs, ""

    def meet(self, grid: Grid) -> None:
        """Wait for the clients with which the run starts."""
        self.grid = grid
        if self.own_app is not None:
            self.population = self.own_app.population
            if not self.recovery.run_id.resumes:  # sites keep the states of a run in a folder with its name
                self.recovery.run_id = RunId.new(str(submitted(grid).get("name", "")))
        else:
            self.population = Population(grid, self.policy, self.shared.signature, self.policy.called, self.policy.clients)
            self.population.gather()

    def everyone(self) -> list[Client]:
        """Return all connected clients; the cohort, if nobody has looked for clients yet."""
        return self.cohort if self.population is None else self.population.everyone()

    def _arrays(self) -> dict[str, Tensor]:
        tensors = self.shared.tensors() if self._newest is None else self._newest.tensors
        return self.shared.whole(tensors, self.batches_trained + batches_trained(self.running.history))

    def outward(self, tensors: Named) -> ArrayRecord:
        """Convert shared ``tensors`` to the arrays of hooks and of Flower's result."""
        arrays = arrays_of(tensors if self.own_app is None else self.shared.whole(tensors, self.batches_trained))
        self._given = dict(arrays), tensors
        return arrays

    def unchanged(self, arrays: ArrayRecord) -> bool:
        """Return whether a hook returned the very objects that it got; arrays never change in place."""
        given, _ = self._given
        return arrays.keys() == given.keys() and all(arrays[name] is array for name, array in given.items())

    def inward(self, arrays: ArrayRecord) -> Named:
        """Convert arrays that a hook returned to the shared tensors.

        They may have the names of the user's or of the converted network. A
        missing, foreign or invalid array raises ``RunFailed``.
        """
        if self.unchanged(arrays):
            return self._given[1]
        own, given, plain = self.shared.tensors(), tensors_of(arrays), plain_names(self.shared.model)
        if strange := sorted(given.keys() - {*plain, *plain.values()}):
            raise RunFailed(CHANGED % f"unknown array {printable(strange[0])}")
        tensors = {name: given[key] for name in own for key in (name, plain[name]) if key in given}
        tensors = {k: t.to(own[k].dtype) if t.is_floating_point() and own[k].is_floating_point() else t for k, t in tensors.items()}
        try:
            sections = self._expected.sections.items()
            self._expected.check({k: to_numpy({n: tensors[n] for n in specs if n in tensors}) for k, specs in sections})
        except WireError as error:
            raise RunFailed(CHANGED % error) from error
        return tensors

    # A training round

    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the clients train, by the strategy's hooks ``configure_train`` and ``aggregate_train``.

        The latter also combines the replies, so that an override gets the new
        tensors, and may change them. A hook may also change the tensors of the
        ``instruction``, and the learning rate.
        """
        number, strategy, before = instruction.round, self.strategy, self.shared.tensors()
        assert strategy is not None, "a round belongs to a start"
        arrays, self.cohort = self.outward(before), self.everyone()  # the cohort of an override that does not call super()
        whole = before, self.shared.auxiliary_tensors(), self.server.optimizer.buffers(), {**self.kept.counted}
        self._round = now = Round(whole, instruction, RoundReplies([], [], {}))
        messages, cohort = strategy._configured("train", number, arrays, self.train_config)
        drawn, self.cohort = self.cohort, cohort
        now.replies = RoundReplies([client.index for client in cohort], [], {})
        if drawn and not messages:
            log(logging.INFO, "round %s: configure_train returned no message, so nobody trains", number)
            self.shared.load(before)
            now.returned = self.outward(before), None
        elif self.secure is not None:
            now.returned = self._secure_round(self.secure, messages)
        elif Phase(self.record.phase) is Phase.EXCHANGE:
            now.returned = strategy._aggregated(number, self.exchanges.round(self.grid, cohort, messages, self.timeout))
        else:
            now.returned = strategy._aggregated(number, self.receive(messages))
        return now.replies

    def ask_to_train(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> list[Message]:
        """Make one train message per client of the cohort, in client order: the code of ``configure_train``."""
        instruction, now, population = self._instruction(number, arrays, config), self.policy, self.population
        assert population is not None
        population.wait_for(now.min_cohort, number)
        self.cohort = population.cohort(now.fraction, now.seed, number, now.min_cohort)
        if self.exchanges.carrier and (late := self.exchanges.late_clients(self.grid)):
            who = now.called.clients(sorted(late))
            log(logging.WARNING, "round %s leaves out %s, since replies to an earlier round are missing", number, who)
            self.cohort = [client for client in self.cohort if client.index not in late]
        self.cohort = [client for client in self.cohort if client.index not in self.server.left_out] or self.cohort
        values: dict[str, Any] = {"learning-rate": instruction.learning_rate}
        values |= {"rate-share": instruction.rate_share} if instruction.rate_share != 1 else {}
        values |= {"objective": instruction.objective} if instruction.objective else {}
        messages = self.messages("train", instruction, self.cohort, values, config)
        self.kept.add(messages, self.cohort, trains=True)
        return messages

    def _instruction(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> Instruction:
        """Return the round's instruction, a new one if a hook has changed it."""
        changed, now = isinstance(self.policy.rate, NamedRates) and self.policy.rate.note(number, config), self._round
        if now is not None and now.instruction.round == number and not changed and self.unchanged(arrays):
            return now.instruction
        self.shared.load(self.inward(arrays))
        return self.server.begin(number)

    def combine(self, number: int, replies: Iterable[Message]) -> Pair:
        """Combine the replies into shared tensors and metrics: the code of ``aggregate_train``.

        Return ``(None, None)`` if too few replies are usable.
        """
        phase = Phase(self.record.phase)
        expected = self.server.expects(number, phase, {client.index: client.samples for client in self.cohort})
        header = header_for(self.shared, number, phase)
        reading = Reading(self.cohort, header, expected)
        read = self._read(self.overheard(replies), reading)
        if self._round is not None:
            self._round.replies = read
        changed = self.server.conclude(read)
        self.server.record = self.kept.with_bytes(self.record)
        accepted = {client.client: client.samples for client in self.record.accepted}
        counted = [part for part in read.parts if part.client in accepted]
        self.kept.note(number, counted, changed)
        if not changed:
            return None, None
        metrics = MetricRecord({"loss": self.record.loss, "samples": sum(accepted.values())})
        if self.own_app is not None:
            own = {index: records for index, records in reading.own.items() if records and index in accepted}
            combined, by_client = self.own_app.metrics.combined(self, own, accepted)
            self.server.record = replace(self.record, own_metrics=numbers_of(combined), client_metrics=by_client)
            metrics = combined if combined and self.own_app.metrics.train_fn else MetricRecord({**(combined or {}), **metrics})
        return self.outward(self.shared.tensors()), metrics

    def _read(self, replies: Iterable[Decoded], reading: Reading) -> RoundReplies:
        """Check the replies. Unless the method needs all at once, average each immediately."""
        who = [client.index for client in self.cohort]
        if (intake := self.server.intake(who)) is None:
            read = RoundReplies(who, *reading.all(replies))
            if Phase(self.record.phase) is not Phase.EXCHANGE:
                return read
            return replace(read, exchange=self.exchanges.session, carrier=self.exchanges.carrier, messages=self.exchanges.messages)
        for decoded in replies:
            client = reading.read(decoded)
            del decoded  # frees its memory while the loop waits for the next reply
            if client is not None:
                intake.take(client, reading.parts.pop(client, None))
        reading.end()
        parts, total = intake.end()
        return RoundReplies(who, parts, reading.refused, reading.wrong, sum=total)

    def _secure_round(self, secure: SecureRounds, messages: Iterable[Message]) -> Pair:
        changed, parts = secure.train(self.grid, messages, self.cohort, self.timeout)
        if self.shared.personal:  # masked replies do not say so, but all in the sum have trained
            self.kept.rounds |= {part.client: self.record.round for part in parts}
        if not changed:
            return None, None
        return self.outward(self.shared.tensors()), MetricRecord({"loss": parts[0].loss, "samples": sum(part.samples for part in parts)})

    def conclude(self, replies: RoundReplies) -> bool:
        """Take what ``aggregate_train`` returned. Return False if the round failed."""
        assert self._round is not None
        now, (arrays, metrics) = self._round, self._round.returned
        self._round = None
        if metrics is not None:
            self.result.train_metrics_clientapp[self.record.round] = metrics
        if arrays is None:
            tensors, auxiliary, buffers, self.kept.counted = now.before
            self.shared.restore(tensors, auxiliary)
            self.server.optimizer.restore(buffers)
            self.server.record = replace(self.record, aggregated=False)
            return False
        if not self.unchanged(arrays):
            self.shared.load(self.inward(arrays))
        if not self.record.aggregated and replies.cohort:  # an overridden hook aggregated without super()
            self.server.record = replace(self.record, aggregated=True)
        return True

    # Statistics

    def measure(self, instruction: Instruction) -> RoundReplies:
        """Measure statistics at all connected clients, or if the method says so at the cohort."""
        everyone = self._measuring(instruction)
        sent = self.messages(STATISTICS, instruction, everyone, {"measured": instruction.measured})
        if self.secure is not None:
            return RoundReplies([client.index for client in everyone], *self.secure.measure(self.grid, sent, everyone, self.timeout))
        return self._measured(self.overheard(self.receive(sent)), instruction, everyone)

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Measure with one message per client and one exchange per layer. None: that failed."""
        policy, exchanges = self.policy, self.exchanges
        if self.secure is not None or self.method.adversary is not None or policy.recalibration == "passes":
            return None
        everyone = self._measuring(instruction)
        clients, steps = [client for client in everyone if client.samples > 0], 1 + len(self.shared.layers)
        sent = self.messages(STATISTICS, instruction, clients, {"measured": instruction.measured}, steps=steps)
        replies, carrier = exchanges.measure(self.grid, clients, sent, self.timeout, policy.recalibration == "exchange")
        if not carrier:
            return None
        read = self._measured(self.overheard(replies, without_training=True), instruction, clients)
        missing = {**read.refused, **{c.index: "it sat out" for c in clients if c.index not in exchanges.session.taking_part}}
        if missing:
            index, reason = next(iter(sorted(missing.items())))
            log(logging.WARNING, "%s took no part in the exchange layer by layer: %s. %s", policy.called.client(index), reason, BY_PASSES)
            return None
        empty = {client.index: "it has no samples" for client in everyone if client not in clients}
        return replace(read, cohort=[client.index for client in everyone], refused=empty, exchange=exchanges.session, carrier=carrier)

    def store(self, instruction: Instruction, replies: RoundReplies) -> None:
        """Store the measured statistics in the server, unless a secure sum has done so."""
        if self.secure is None:
            super().store(instruction, replies)

    def _measuring(self, instruction: Instruction) -> list[Client]:
        return self.cohort if self.method.measures_cohort(instruction.round) else self.everyone()

    def _measured(self, replies: Iterable[Decoded], instruction: Instruction, clients: Sequence[Client]) -> RoundReplies:
        expected = self.server.expects(instruction.round, instruction.phase, {client.index: client.samples for client in clients})
        header = header_for(self.shared, instruction.round, instruction.phase)
        read = Reading(clients, header, expected).all(replies)
        return RoundReplies([client.index for client in clients], *read)

    # An evaluation, and the end of the run

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate the shared ``tensors`` after round ``number``, by the strategy's hooks."""
        evaluations, arrays = self.evaluations, self.outward(tensors)
        assert self.strategy is not None, "an evaluation belongs to a start"
        evaluations.clients = self.everyone() if evaluations.at_clients else []
        messages, evaluations.clients = self.strategy._configured("evaluate", number, arrays, self.evaluate_config)
        return evaluations.after(number, tensors, messages)

    # Messages

    def messages(
        self,
        kind: str,
        instruction: Instruction,
        clients: Sequence[Client],
        values: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        steps: int = 1,
    ) -> list[Message]:
        """Make one message per client, with ``values`` in fl-bn's config, and the user's ``config``.

        The round's number is added to the latter. Messages live for ``steps`` times
        the round's timeout.
        """
        self._down = {section: to_numpy(tensors) for section, tensors in instruction.sections.items()}
        content = to_records(self._down, header_for(self.shared, instruction.round, instruction.phase))
        add_to_config(content, {**values, **self.recovery.run_id.to_config()})
        group, ttl = str(instruction.round), self.policy.timeout * steps
        messages = [Message(RecordDict(dict(content.items())), client.node, kind, ttl=ttl, group_id=group) for client in clients]
        key = "config" if self.own_app is None else self.own_app.config_key
        theirs = {**(with_share(config, instruction.rate_share) if config else {}), "server-round": instruction.round}
        for message in messages:  # each message has its own copy, which its client or a hook may change
            message.content[key] = ConfigRecord({**theirs})
        return messages

    def receive(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Send messages, and yield the replies."""
        return receive(self.grid, messages, self.timeout, self.policy.retry, self.policy.called)

    def overheard(self, replies: Iterable[Message], without_training: bool = False) -> Iterable[Decoded]:
        """Decode the replies, and record for the disclosure report which data they reveal.

        Replies of simulated attackers are forged here, where all others are known.
        """
        clients = self.everyone()
        decoded = self.disclosures.note(replies, clients, self.exchanges.session, self.record.round, without_training)
        if self.method.adversary is None or self.method.adversary.attack == LABEL_FLIP:
            return decoded
        from fl_bn.flower.adversary import corrupt  # for experiments alone

        return corrupt(list(decoded), clients, self.policy.clients, self.method.adversary, self.server.defence, self._down)
