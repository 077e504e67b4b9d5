"""Carry one run's rounds over a Flower grid: make the messages, call the strategy's hooks, and read the replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_bn.federation.callbacks import Callback, Callbacks, Running
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.narrow import EXACT, Overflow
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Measured, Newest, Passes, TooFewMeasured
from fl_bn.federation.payload import Named, Payload, to_numpy
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.record import RoundRecord, batches_trained, why_failed
from fl_bn.federation.replies import Expected
from fl_bn.federation.rounds import Rounds, exchanges_in_rounds
from fl_bn.federation.run import Diverged, Start, run
from fl_bn.federation.schema import Schema
from fl_bn.federation.server import Server
from fl_bn.federation.transport import Transport
from fl_bn.federation.values import Instruction, Reply, RoundReplies
from fl_bn.flower.adversary import corrupt
from fl_bn.flower.compat import log, repeat_cancelled, say_round
from fl_bn.flower.deployment import Progress
from fl_bn.flower.disclosure import DisclosureReport
from fl_bn.flower.evaluation import EvaluationsAtClients
from fl_bn.flower.global_model import GlobalModel, average_kept
from fl_bn.flower.layerwise.exchanges import BY_PASSES, Exchanges
from fl_bn.flower.mods import NOISE
from fl_bn.flower.normalisation import describe_round, in_short
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.recovery import Checkpoint, Recovery, Starts
from fl_bn.flower.wire.codec import arrays_of, header_for, tensors_of, to_records
from fl_bn.flower.wire.fields import SAVE, STATISTICS, add_to_config
from fl_bn.flower.wire.messages import evaluated
from fl_bn.flower.wire.messaging import receive, send_and_receive
from fl_bn.flower.wire.replies import CheckedReading, Decoded, read_replies
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Method, Phase
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.client_names import ClientNames
from fl_bn.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds


EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
NOTHING = "a run of 0 rounds only measures statistics: set calibrate to -1, or to a number of passes (now it asks for none)"


@dataclass(repr=False)
class RunResult(Result):
    """Hold Flower's result of a run, and every round's record.

    Attributes:
        records: the records in the order of the rounds. In the last one, ``records[-1].client_metrics`` has each
            client's own training metrics, and ``records[-1].client_evaluation`` each client's evaluation.
    """

    records: list[RoundRecord] = field(default_factory=list)


class GridTransport(Transport):
    """Run the rounds of one strategy over a Flower grid.

    ``federation.run`` calls ``train``, ``measure`` and ``evaluate``. ``train`` calls the strategy's hooks ``configure_train``
    and ``aggregate_train``, and ``evaluate`` calls the other two. The hooks' own code is ``ask_to_train``, ``combine``,
    ``ask_to_evaluate`` and ``combine_evaluations``.

    The arguments are those of ``BatchNormStrategy``.
    """

    config_key = "config"
    """The name of the user's config in a message."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rounds: Rounds,
        *,
        optimizer: ServerOptimizer | None = None,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        callbacks: Sequence[Callback] = (),
        save_clients: str = "",
        defence: Defence = NO_DEFENCE,
        keep_checkpoint: Callable[[Checkpoint], int] | None = None,
        secure: SecureAggregation | None = None,
        task: Task = CLASSIFICATION,
    ) -> None:
        self.server = Server(model, method, rounds, optimizer=optimizer, defence=defence)
        self.shared, self.method, self.policy, self.defence, self.task = self.server.shared, method, rounds, defence, task
        self.central_evaluation, self.save_clients, self.callbacks = evaluate, save_clients, Callbacks(callbacks)
        self.cohort, self.unseen, self.timeout = list[Client](), dict[str, Tensor](), rounds.timeout
        self.running, self.progress = Running(task, self._arrays), Progress(None)
        self.population: Population | None = None
        self.told, self.evaluating = list[Client](), list[Client]()  # clients that got an evaluate message, and clients whose metrics count
        self.evaluations = EvaluationsAtClients(task, rounds.called)
        self.sent, self._down = list[Message](), Payload()
        self.starts = Starts(self.shared)
        self.batches_trained = 0  # the number of batches that a client has trained on
        self._newest: Newest | None = None  # None before ``start``
        self._rounding = EXACT  # the rounding of the messages that were sent last
        self.at_clients = self.shared.personal or rounds.at_clients
        self.exchanges = Exchanges(
            rounds.exchange, self.shared.model, self.shared.exchanged(), defence.average, not defence.active, rounds.called
        )
        self.disclosures = DisclosureReport(self.shared.model, self.shared.locality, rounds.called)
        self.secure = None if secure is None else self._secure_rounds(secure)
        accountant = None if self.secure is None else self.secure.accountant
        self.recovery = Recovery(save_clients, rounds.checkpoint_every, keep_checkpoint, accountant, rounds.called)
        self.statistics = Passes(self.server, accountant is not None)
        self.hooks: Strategy | None = None  # the strategy whose hooks are called; None: no run goes on
        self._global_model = GlobalModel(self)
        self._asked: tuple[Instruction, Mapping[str, Array]] | None = None  # the round's instruction, and its tensors as the hook got them
        self._read: RoundReplies | None = None  # the round's replies, once they are read
        self._combined: Mapping[str, Array] | None = None  # the new shared tensors, as the hook got them
        self._returned: tuple[ArrayRecord | None, MetricRecord | None] = None, None  # what aggregate_train returned

    def _secure_rounds(self, settings: SecureAggregation) -> SecureRounds:
        from fl_bn.flower.secagg.rounds import SecureRounds  # imported only now, since a plain run needs no SecAgg+

        return SecureRounds(settings, self.server, self.disclosures.masked)

    @property
    def record(self) -> RoundRecord:
        """Return the record of the current round, or of the last one."""
        return self.server.record

    # The run

    def start(
        self,
        hooks: Strategy,
        grid: Grid,
        initial_arrays: ArrayRecord | None,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        resume: Checkpoint | None,
    ) -> RunResult:
        """Run the rounds of ``hooks``, a strategy. The other arguments are those of its ``start``."""
        if self.secure is not None:
            check_secure(hooks)
        if exchanges_in_rounds(self.method):
            self.exchanges.check(grid)
        self.server.rounds = num_rounds
        if num_rounds == 0 and (reason := why_not(self.shared.model, self.method) or ("" if self.statistics.calibration(0) else NOTHING)):
            raise RunFailed(reason)
        hooks.summary()
        self.running.reason = ""
        if resume is not None:
            self.recovery.go_back(resume, num_rounds, self.shared, self.server.optimizer)
            if self.shared.statistics() and self.statistics.rescales(num_rounds):
                self.shared.was_at_unit_scale()
        elif initial_arrays is not None:
            self.starts.begin_with(initial_arrays)
        begin = Start() if resume is None else Start(resume.round + 1, resume.failed)
        self.grid, self.timeout, self.hooks, self.result = grid, timeout, hooks, RunResult()
        self._train_config, self._evaluate_config, self._evaluate_fn = train_config, evaluate_config, evaluate_fn
        if (invoker := getattr(grid, "_retry_invoker", None)) is not None:  # the grid of a deployment
            repeat_cancelled(invoker)
        self._newest = Newest(self.shared.tensors(), begin.round - 1, begin.round - 1)
        try:
            self.callbacks.on_start(self.running)
            self._run(num_rounds, begin, self._newest)
        except BaseException as error:
            self.exchanges.stop()
            self._newest.say(self.method)
            self.callbacks.on_end(error)
            raise
        finally:
            self.hooks = None
        self.exchanges.stop()
        self.callbacks.on_end(None)
        return self.result

    def _run(self, rounds: int, begin: Start, newest: Newest) -> None:
        """Run all rounds (``federation.run``), and report every round at its end."""
        server, result, failed = self.server, self.result, begin.failed

        def show(measured: Measured) -> None:
            """Evaluate after a statistics-only exchange, and report it like a round. Called only in a run of 0 rounds."""
            server.record, result.arrays, number = measured.record, self.outward(measured.tensors), measured.record.round
            newest.take(0, measured.tensors)
            if measured.last or number % self.policy.evaluate_every == 0:
                server.record = replace(server.record, evaluation=self.evaluate(number, measured.tensors))
            self._tell(server.record)

        self.meet(self.grid)
        result.arrays = self.outward(self.shared.tensors())
        if begin.round == 1 and rounds:
            self.evaluate_here(0, self.shared.tensors())
        try:
            for one in run(server, self, rounds, self.statistics, begin, show):
                newest.take(one.record.round, one.evaluated)  # for the callbacks, which get this round next
                result.records.append(self._tell(one.record))
                result.arrays, failed = self.outward(newest.tensors), one.failed
                if self.running.reason and one.record.round < rounds:
                    log(logging.INFO, "the run ends after round %s of %s: %s", one.record.round, rounds, self.running.reason)
                    newest.say(self.method)
                    self._end_early(one.record.round, newest.tensors)
                    break
                self.recovery.after_round(one.record.round, rounds, one.tensors, self.shared, server.optimizer, failed)
        except (TooFewMeasured, Diverged) as error:
            raise RunFailed(str(error)) from error
        if 0 < rounds == failed:
            raise RunFailed(f"none of the {failed} rounds had enough usable replies, so nothing was trained. {why_failed(self.record)}")

    def meet(self, grid: Grid) -> None:
        """Wait for the clients with which the run starts."""
        self.grid, self.population = grid, self._population(grid)
        self.population.gather()

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.policy, self.shared.signature, self.recovery.run_id.gone_back_to + 1)

    def everyone(self) -> list[Client]:
        """Return all connected clients that may train. If nobody has looked for clients yet, return the cohort."""
        return self.cohort if self.population is None else self.population.everyone()

    def _tell(self, record: RoundRecord) -> RoundRecord:
        """Log the result of a round, call the callbacks, and return the record with its disclosures."""
        self.batches_trained += batches_trained([record])
        rounds, called = self.server.rounds, self.policy.called
        long = describe_round(record, rounds, self.task, self.method, self.shared.model, called)
        say_round(in_short(record, rounds, self.task, called), long)
        complete = self.disclosures.enter(record)
        self.callbacks.on_round(complete, rounds)
        self.progress.on_round(complete, rounds)
        return complete

    def _arrays(self) -> dict[str, Tensor]:
        """Return the tensors of the shared model that was evaluated last, for callbacks."""
        return self.shared.whole(self._evaluated, self.batches_trained + batches_trained(self.running.history))

    @property
    def _evaluated(self) -> Named:
        """Return name -> shared tensor of the model as evaluated last. Before ``start``: as it is now."""
        return self.shared.tensors() if self._newest is None else self._newest.tensors

    def save(self, path: str | Path) -> None:
        """Save the shared model of the last evaluation at ``path``, see ``BatchNormStrategy.save``."""
        save_file(self.shared.whole(self._evaluated, self.batches_trained), str(path))

    # What the hooks get and return

    def outward(self, tensors: Named) -> ArrayRecord:
        """Convert shared ``tensors`` to the arrays that the hooks and Flower's result get."""
        return arrays_of(tensors)

    def inward(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Convert arrays that a hook returned to tensors with the shared model's names: the inverse of ``outward``."""
        return tensors_of(arrays)

    # A training round

    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the clients of a round train, by the strategy's hooks ``configure_train`` and ``aggregate_train``.

        ``aggregate_train`` also combines the replies (``combine``), since a user's override gets the new tensors, and may
        change them. ``conclude`` then takes what it returned.

        Args:
            instruction: the instruction. A hook may change its tensors, and the learning rate in the config.
        """
        number, hooks, called = instruction.round, self._hooks, self.policy.called
        self._before = self.shared.tensors()
        arrays = self.outward(self._before)
        self._asked, self._read, self._combined = (instruction, dict(arrays)), None, None
        self.cohort = self.everyone()  # for an override that does not call super()
        returned = listed(hooks.configure_train(number, arrays, self._train_config, self.grid))
        drawn = self.cohort
        messages, self.cohort = addressed(returned, drawn, "configure_train", called)
        self.sent = messages  # messages that are sent again are appended to this list
        if drawn and not messages:
            log(logging.INFO, "round %s: configure_train returned no message, so nobody trains", number)
            self.shared.load(self._before)
            self._returned, self._combined = (arrays, None), dict(arrays)
            return RoundReplies([], [], {})
        if self.secure is not None:
            self._returned = self._secure_round(self.secure, messages)
        else:
            if Phase(self.record.phase) is Phase.EXCHANGE:
                replies: Iterable[Message] = self.exchanges.round(self.grid, self.cohort, messages, self.timeout)
            else:
                replies = receive(self.grid, messages, self.timeout, self.policy.retry, called=called)
            self._returned = pair(hooks.aggregate_train(number, replies_for(hooks, "aggregate_train", replies)))
        read, self._read = self._read, None
        return read or RoundReplies([client.index for client in self.cohort], [], {})

    @property
    def _hooks(self) -> Strategy:
        assert self.hooks is not None, "a round belongs to a start"
        return self.hooks

    def ask_to_train(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> list[Message]:
        """Make one train message per client of the cohort, in client order: the code of ``configure_train``.

        Args:
            number: the round, from 1.
            arrays: the shared tensors, which an override may have changed.
            config: values for every message.
        """
        instruction = self._instruction(number, arrays, config)
        assert self.population is not None
        self.population.wait_for(self.policy.min_cohort, number)
        self.cohort = self.population.cohort(self.policy.fraction, self.policy.seed, number, self.policy.min_cohort)
        if late := self.exchanges.late_clients(self.grid):
            who = self.policy.called.clients(sorted(late))
            log(logging.WARNING, "round %s leaves out %s, since replies to an earlier round are missing", number, who)
            self.cohort = [client for client in self.cohort if client.index not in late]
        self.cohort = [client for client in self.cohort if client.index not in self.server.left_out] or self.cohort
        share = {} if instruction.rate_share == 1 else {"rate-share": instruction.rate_share}
        told = {"objective": instruction.objective} if instruction.objective else {}
        values = {"learning-rate": instruction.learning_rate, **share, **told}
        messages = self.messages("train", instruction, self.cohort, values, self._their_config(config, instruction))
        self.starts.add(messages, self.cohort, self.recovery.keeps)
        return self.recovery.tell(messages, self.cohort)

    def _instruction(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> Instruction:
        """Return the instruction of the round. If a hook has changed the tensors, the round begins again with them."""
        if self._asked is not None and self._asked[0].round == number and _same(arrays, self._asked[1]):
            return self._asked[0]
        self.shared.load(self.inward(arrays))
        return self.server.begin(number)

    def _their_config(self, config: Mapping[str, Any], instruction: Instruction) -> dict[str, Any]:
        """Return the values of the user's config in a round's messages: here ``config``, unchanged."""
        return {**config}

    def combine(self, number: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, and combine them into the new shared model: the code of ``aggregate_train``.

        Args:
            number: the round.
            replies: the replies to the train messages.

        Returns:
            The shared tensors, and the metrics ``loss`` and ``samples``; ``(None, None)`` if too few replies are usable.
        """
        phase = Phase(self.record.phase)
        expected = self.server.expects(number, phase, {client.index: client.samples for client in self.cohort})
        header = header_for(self.shared, number, phase, self.policy.payload)
        self._reading = CheckedReading(self.cohort, header, expected, self.server.rounding, self.sent)
        self._read = self._read_replies(self.overheard(replies), self._reading)
        changed = self.server.conclude(self._read)
        self.server.record = self.starts.counted(self.record)
        accepted = {client.client for client in self.record.accepted}
        counted = [part for part in self._read.parts if part.client in accepted]
        self.recovery.check(number, counted)
        if not changed:
            return None, None
        self.recovery.count(number, counted)
        samples = sum(client.samples for client in self.record.accepted)
        arrays = self.outward(self.shared.tensors())
        self._combined = dict(arrays)
        return arrays, MetricRecord({"loss": self.record.loss, "samples": samples})

    def _read_replies(self, replies: Iterable[Decoded], reading: CheckedReading) -> RoundReplies:
        """Check the replies to train messages.

        If the method does not need all replies at once, add each to the average immediately, and free its memory.
        """
        who = [client.index for client in self.cohort]
        if (intake := self.server.intake(who)) is None:
            parts, refused, wrong = read_replies(replies, reading)
            if Phase(self.record.phase) is not Phase.EXCHANGE:
                return RoundReplies(who, parts, refused, wrong)
            exchanges = self.exchanges
            return RoundReplies(who, parts, refused, wrong, exchanges.session, exchanges.carrier, exchanges.messages)
        for decoded in replies:
            client = reading.read(decoded)
            del decoded  # frees its memory while the loop waits for the next reply
            if client is not None:
                intake.take(client, reading.parts.pop(client, None))
        reading.end()
        parts, total = intake.end()
        return RoundReplies(who, parts, reading.refused, reading.wrong, sum=total)

    def _secure_round(self, secure: SecureRounds, messages: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train for one round by a secure sum, which hides single clients.

        Return the shared tensors and the metrics. If the sum failed, return ``(None, None)``.
        """
        changed, parts = secure.train(self.grid, messages, self.cohort, self.timeout)
        self._read = RoundReplies([client.index for client in self.cohort], parts, {})
        self.recovery.check(self.record.round, parts)
        if not changed:
            return None, None
        arrays = self.outward(self.shared.tensors())
        self._combined = dict(arrays)
        return arrays, MetricRecord({"loss": parts[0].loss, "samples": sum(part.samples for part in parts)})

    def conclude(self, replies: RoundReplies) -> bool:
        """Take the tensors and metrics that ``aggregate_train`` returned. Return False if the round failed: nothing changes then."""
        (arrays, metrics), self._returned = self._returned, (None, None)
        if metrics is not None:
            self.result.train_metrics_clientapp[self.record.round] = metrics
        if arrays is None:
            self.shared.load(self._before)
            return False
        if not _same(arrays, self._combined):
            self.shared.load(self.inward(arrays))
        if not self.record.aggregated and replies.cohort:  # an overridden hook aggregated without super()
            self.server.record = replace(self.record, aggregated=True)
        return True

    # Statistics

    def measure(self, instruction: Instruction) -> RoundReplies:
        """Measure statistics at all connected clients, or only at the round's cohort if the method says so. Return the checked replies."""
        everyone = self._measuring(instruction)
        sent = self.messages(STATISTICS, instruction, everyone, {"measured": instruction.measured})
        who = [client.index for client in everyone]
        if self.secure is not None:
            return RoundReplies(who, *self.secure.measure(self.grid, sent, everyone, self.timeout))
        return RoundReplies(who, *self._measured(self.overheard(self._send(sent)), instruction, everyone, sent))

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Measure the clients' statistics layer by layer, with one message per client and one exchange per layer.

        Return None if the settings or the engine do not allow such an exchange, or if a client with data dropped out of
        the exchange.
        """
        policy, exchanges = self.policy, self.exchanges
        if self.secure is not None or self.method.adversary is not None or policy.recalibration == "passes":
            return None
        everyone = self._measuring(instruction)
        clients, steps = [client for client in everyone if client.samples > 0], 1 + len(self.shared.layers)
        sent = self.messages(STATISTICS, instruction, clients, {"measured": instruction.measured}, steps=steps)
        tries = policy.recalibration == "exchange"
        replies, carrier = exchanges.measure(self.grid, clients, sent, self.timeout, policy.memory, tries)
        if not carrier:
            return None
        parts, refused, wrong = self._measured(self.overheard(replies, without_training=True), instruction, clients, sent)
        missing = refused | {c.index: "it sat out" for c in clients if c.index not in exchanges.session.taking_part}
        if missing:
            index, reason = next(iter(sorted(missing.items())))
            log(logging.WARNING, "%s took no part in the exchange layer by layer: %s. %s", policy.called.client(index), reason, BY_PASSES)
            return None
        empty = {client.index: "it has no samples" for client in everyone if client not in clients}
        return RoundReplies([client.index for client in everyone], parts, empty, wrong, exchanges.session, carrier)

    def store(self, instruction: Instruction, replies: RoundReplies) -> RoundReplies:
        """Store the measured statistics in the server, and return the replies. A secure sum has stored its statistics already."""
        return replies if self.secure is not None else super().store(instruction, replies)

    def _measuring(self, instruction: Instruction) -> list[Client]:
        return self.cohort if self.method.measures_cohort(instruction.round) else self.everyone()

    def _measured(
        self, replies: Iterable[Decoded], instruction: Instruction, clients: Sequence[Client], sent: Sequence[Message]
    ) -> tuple[list[Reply], dict[int, str], set[int]]:
        expected = self.server.expects(instruction.round, instruction.phase, {client.index: client.samples for client in clients})
        header = header_for(self.shared, instruction.round, instruction.phase)
        return read_replies(replies, CheckedReading(clients, header, expected, sent=sent))

    # An evaluation

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate at the clients by the strategy's hooks. Then call ``evaluate_fn``, if there is one.

        If clients do not evaluate in this run, the strategy's ``evaluate`` is called in their place, if there is one. All
        metrics are stored in ``result``. Those that are single numbers are returned, by name.

        Args:
            number: the round.
            tensors: name -> shared tensor.
        """
        hooks, metrics = self._hooks, dict[str, float]()
        self.told = self.evaluating = self.everyone() if self.at_clients else []
        returned = listed(hooks.configure_evaluate(number, self.outward(tensors), self._evaluate_config, self.grid))
        messages, reached = addressed(returned, self.told, "configure_evaluate", self.policy.called)
        self.sent, self.evaluating = messages, [client for client in self.evaluating if client in reached]
        if self.secure is not None:
            at_clients = self.evaluations.as_a_sum(self.secure, self.grid, messages, self.evaluating, self.timeout, self._send)
        else:
            at_clients = hooks.aggregate_evaluate(number, self._send(messages))
            if not isinstance(at_clients, MetricRecord | None):
                raise RunFailed(f"aggregate_evaluate must return a MetricRecord or None, but returned {at_clients!r:.100}")
        if at_clients is not None:
            self.result.evaluate_metrics_clientapp[number] = at_clients
            metrics = numbers_of(at_clients)
        elif self.central_evaluation is not None and not self.at_clients:
            self.shared.load(tensors)
            metrics = self.central_evaluation(self.shared.model)
            self.result.evaluate_metrics_serverapp[number] = MetricRecord({**metrics})
        return metrics | {name: value for name, value in self.evaluate_here(number, tensors).items() if name not in metrics}

    def ask_to_evaluate(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> list[Message]:
        """Make one evaluate message per client that evaluates: the code of ``configure_evaluate``.

        There are none if clients have neither models nor test data of their own. If clients have models of their own, only
        clients that have trained evaluate. The others get a message only if models are to be saved.

        Args:
            number: the round.
            arrays: the shared tensors.
            config: values for every message.
        """
        if not self.at_clients:
            return []
        self.shared.load(self.inward(arrays))
        save = self.save_clients if number == self.server.rounds and self.shared.personal else ""
        everyone = self.everyone()
        have_models = self.with_models(everyone)
        if len(have_models) < len(everyone):
            line = "round %s: %d of %d clients have trained so far, and evaluate models of their own"
            log(logging.INFO, line, number, len(have_models), len(everyone))
        self.evaluating = self.evaluators_of(number, have_models, len(everyone))
        self.told = everyone if save else self.evaluating
        instruction, values = self.shared.instruction(number, Phase.TRAIN), {"save": save} if save else {}
        messages = self.messages("evaluate", instruction, self.told, values, self._their_config(config, instruction))
        self.starts.add(messages, self.told, self.recovery.keeps)
        return messages

    def evaluators_of(self, number: int, clients: list[Client], population: int) -> list[Client]:
        """Return those of ``clients`` that evaluate in this round: here, all. ``population`` is the number of all clients."""
        return clients

    def with_models(self, clients: list[Client]) -> list[Client]:
        """Return the clients that have stored tensors of their own, so that their models differ; all clients if none has."""
        return [client for client in clients if self.method.personal and self.recovery.keeps(client.index)] or clients

    def combine_evaluations(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean, standard deviation and worst value of the clients' metrics: the code of ``aggregate_evaluate``.

        Args:
            number: the round.
            replies: the replies to the evaluate messages. Each client counts once.

        Returns:
            The metrics; None if clients do not evaluate, or if none sent a valid metric.
        """
        if not self.at_clients:
            return None
        header = header_for(self.shared, number, Phase.TRAIN)
        expected = Expected(header.round, header.signature, Schema({}), evaluated(self.task))
        reading = CheckedReading(self.evaluating, header, expected, sent=self.sent)
        metrics, by_client = self.evaluations.in_the_clear(self.disclosures.evaluations(replies, self.everyone()), reading)
        self.server.record = replace(self.record, client_evaluation=by_client)
        return metrics

    def evaluate_here(self, number: int, tensors: Named) -> dict[str, float]:
        """Call ``evaluate_fn``, store its metrics in ``result``, and return those that are single numbers, by name.

        The returned dict is empty without an ``evaluate_fn`` or a global model, or if ``evaluate_fn`` returns None.
        """
        if self._evaluate_fn is None or (arrays := self._global_model.at(number, tensors)) is None:
            return {}
        if (metrics := self._evaluate_fn(number, arrays)) is None:
            return {}
        if not isinstance(metrics, MetricRecord):
            must = "evaluate_fn(round, arrays) must return a MetricRecord or None"
            raise RunFailed(f"{must}, but in round {number} it returned {metrics!r:.200}")
        self.result.evaluate_metrics_serverapp[number] = metrics
        return numbers_of(metrics)

    # The end of the run

    def finish_round(self, number: int, changed: bool) -> None:
        """Average the layers that clients keep, if ``number`` is the last round of the run and ``rounds.unseen`` is set."""
        if number == self.server.rounds:
            self._average_kept(number)

    def _end_early(self, number: int, tensors: Named) -> None:
        """Finish a run that stops early: let clients save their own models, and collect the average of the layers that they keep."""
        self.shared.load(tensors)
        if self.save_clients and self.shared.personal:
            instruction = self.shared.instruction(number, Phase.TRAIN)
            messages = self.messages(SAVE, instruction, self.everyone(), {"save": self.save_clients})
            self.evaluations.save_models(messages, self._send)
        self._average_kept(number)

    def _average_kept(self, number: int) -> None:
        """Average the layers that clients keep, for clients that did not train, if ``rounds.unseen`` is set."""
        if self.policy.unseen and self.method.personal:
            self.unseen = average_kept(self, number)

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
        """Make one message per client.

        Args:
            kind: Flower's message type.
            instruction: the instruction, the same for all.
            clients: the addressees.
            values: further values for fl-bn's config in the messages.
            config: the user's config, to which the round's number is added. None: the messages have no such config.
            steps: a factor for the messages' time to live, which is ``steps`` times the round's timeout.

        Raises:
            RunFailed: a weight is too large for the dtype in which weights are sent.
        """
        self._rounding = self.server.rounding if kind == "train" else EXACT
        try:
            self._down = self._rounding.narrow({section: to_numpy(tensors) for section, tensors in instruction.sections.items()})
        except Overflow as error:
            raise RunFailed(str(error)) from error
        content = to_records(self._down, header_for(self.shared, instruction.round, instruction.phase, self._rounding.dtype))
        add_to_config(content, {**values, "version": here(), **self.recovery.run_id.to_config()})
        group, ttl = str(instruction.round), self.policy.timeout * steps
        self.sent = [Message(RecordDict(dict(content.items())), client.node, kind, ttl=ttl, group_id=group) for client in clients]
        for message in self.sent if config is not None else ():  # each message has its own copy, which its client or a hook may change
            message.content[self.config_key] = ConfigRecord({**(config or {}), "server-round": instruction.round})
        return self.sent

    def _send(self, messages: Iterable[Message]) -> list[Message]:
        """Send messages, and return the replies."""
        return send_and_receive(self.grid, messages, self.timeout, self.policy.retry, self.policy.called)

    def overheard(self, replies: Iterable[Message], without_training: bool = False) -> Iterable[Decoded]:
        """Decode the replies, and record for the disclosure report which data they reveal.

        If the method simulates attackers that send forged values, the replies of the simulated Byzantine clients are
        forged here, where all other replies are known.

        Args:
            replies: the clients' replies.
            without_training: whether the clients only measured statistics in the layer-wise exchange.

        Returns:
            The decoded replies, in the order of ``replies``.
        """
        clients = self.everyone()
        decoded = self.disclosures.note(replies, clients, self.exchanges.session, self.record.round, without_training)
        if self.method.adversary is None or self.method.adversary.flips_labels:
            return decoded
        return corrupt(list(decoded), clients, self.policy.clients, self.method.adversary, self.defence, self._down, self._rounding)


def _same(arrays: ArrayRecord, before: Mapping[str, Array] | None) -> bool:
    """Return whether ``arrays`` has the very objects of ``before``, which a hook got. An array cannot be changed in place."""
    return before is not None and arrays.keys() == before.keys() and all(arrays[name] is array for name, array in before.items())


def numbers_of(metrics: MetricRecord) -> dict[str, float]:
    """Return the metrics of a record that are single numbers, by name. Metrics that are lists are left out."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


SECURE = ("aggregate_train", "aggregate_evaluate")  # hooks that get clients' replies, which a secure sum hides


def outside(strategy: Strategy) -> RunFailed:
    """Return the error for a hook of ``strategy`` that somebody else than its own ``start`` called, such as Flower's noisy wrappers."""
    return RunFailed(
        f"only strategy.start(grid, ...) of {type(strategy).__name__} itself calls its hooks: put your steps into overridden hooks, "
        f"evaluate_fn and callbacks, in place of a loop of your own or of a strategy around it ({NOISE})"
    )


def overrides(strategy: Strategy, hook: str) -> bool:
    """Return whether user code defines the method ``hook`` of ``strategy``: in a class outside fl-bn, or as an instance attribute."""
    if hook in vars(strategy):
        return True
    owner = next(kind for kind in type(strategy).__mro__ if hook in vars(kind))
    return not owner.__module__.startswith("fl_bn.flower.")


def check_secure(strategy: Strategy) -> None:
    """Refuse a strategy that overrides ``aggregate_train`` or ``aggregate_evaluate``, for runs with secure aggregation.

    These two hooks get the clients' replies. A secure sum hides the replies, so it never calls the hooks.

    Raises:
        ValueError: ``strategy`` overrides one of the two hooks.
    """
    if called := [hook for hook in SECURE if overrides(strategy, hook)]:
        raise ValueError(
            f"{type(strategy).__name__} overrides {called[0]}, but with secure aggregation the server sees no client's reply, so this "
            "hook is never called: remove the hook, or switch secure aggregation off"
        )


def addressed(messages: Iterable[Message], clients: Sequence[Client], hook: str, called: ClientNames) -> tuple[list[Message], list[Client]]:
    """Return the messages of a hook as a list, and the clients to which they go.

    A hook may leave out some of the clients that fl-bn chose.

    Args:
        messages: what the hook returned.
        clients: the clients that fl-bn chose.
        hook: the hook's name.
        called: the clients' names.

    Raises:
        RunFailed: the hook returned None, a message is for another node, or a client gets two.
    """
    if messages is None:
        raise RunFailed(f"{hook} returned None: let it return the messages of super().{hook}(...), or some of them")
    sent = list(messages)
    nodes = [message.metadata.dst_node_id for message in sent]
    known = {client.node for client in clients}
    if strangers := sorted(set(nodes) - known):
        raise RunFailed(
            f"{hook} returned a message for {called.node(strangers[0])}, which is none of the {len(clients)} clients of this round: return "
            f"the messages of super().{hook}(...), or some of them"
        )
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise RunFailed(f"{hook} returned {nodes.count(twice)} messages for {called.node(twice)}: return one per client")
    if missing := [client.index for client in clients if client.node not in set(nodes)]:
        log(logging.INFO, "%s leaves out %s", hook, called.clients(missing))
    return sent, [client for client in clients if client.node in set(nodes)]


def replies_for(strategy: Strategy, hook: str, replies: Iterable[Message]) -> Iterable[Message]:
    """Return ``replies``. If the user's code overrides ``hook``, they become a list, which that code may read twice."""
    return list(replies) if overrides(strategy, hook) else replies


def listed(messages: Any) -> Any:
    """Return the messages of a hook that is a generator as a list, so that the hook has run before anything else reads what it set."""
    return list(messages) if isinstance(messages, Iterator) else messages


def pair(returned: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Check that ``aggregate_train`` returned a pair of arrays and metrics, and return it.

    Raises:
        RunFailed: It returned something else, such as None without a ``return``.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        must = "aggregate_train must return a pair, arrays and metrics, as super().aggregate_train(...) does"
        raise RunFailed(f"{must}, but returned {returned!r:.100}")
    for value, kind in zip(returned, (ArrayRecord, MetricRecord), strict=True):
        if not isinstance(value, kind | None):
            raise RunFailed(f"aggregate_train must return an ArrayRecord and a MetricRecord, or None for them, but one is {value!r:.100}")
    return returned
