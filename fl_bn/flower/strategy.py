"""The strategy: one server loop for every method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_bn.federation.callbacks import Callback, Callbacks
from fl_bn.federation.defence import NO_DEFENCE, Defence, TooFew
from fl_bn.federation.narrow import EXACT, Overflow
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Exchanged, Measured, Passes, TooFewMeasured
from fl_bn.federation.payload import Payload, to_numpy
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.replies import Expected
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.schema import Schema
from fl_bn.federation.server import RoundReplies, Server
from fl_bn.federation.values import Instruction, Reply
from fl_bn.flower.app.adversary import corrupt
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.app.client_app import STATISTICS
from fl_bn.flower.app.disclosure import DisclosureReport
from fl_bn.flower.app.normalisation import describe_round, in_short, say_layers, watch
from fl_bn.flower.app.recovery import Recovery
from fl_bn.flower.app.unseen import average_kept
from fl_bn.flower.compat import simulated
from fl_bn.flower.evaluation import EvaluationsAtClients
from fl_bn.flower.layerwise.exchanges import BY_PASSES, Exchanges
from fl_bn.flower.log import log, say_round
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.wire.codec import arrays_of, header_for, tensors_of, to_records
from fl_bn.flower.wire.messages import evaluated
from fl_bn.flower.wire.messaging import receive, send_and_receive
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies, with_header
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Method, Phase, Refresh
from fl_bn.secure.settings import SecureAggregation
from fl_bn.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds

WHY = "the warnings above say why (values that are not finite mean that training diverged: lower the learning rate)"
NOTHING = "a run of 0 rounds measures statistics alone: set calibrate to -1, or to a number of passes"
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class BatchNormStrategy(Strategy):
    """Trains ``model`` by ``method`` over the clients of a grid.

    ``model`` is any torch network, unconverted; its tensors are the start of the run. ``optimizer`` steps on the pseudo-gradient of
    the shared weights (default: the average itself). ``callbacks`` are called after every round and at the end; ``evaluate`` maps the
    global model to metrics. ``save_clients``: name of the run's folder, in which clients with models of their own save them at the end,
    none if empty. ``keep_checkpoint`` stores a ``Checkpoint`` and returns the oldest round that the run can still go back to.
    ``secure``: SecAgg+.
    ``defence``: robust rules for statistics and updates, against how many Byzantine clients; the statistics' rule serves the layer-wise
    exchange (FedTAN), too. ``task``: whose metrics clients with models of their own evaluate, and the log shows.

    What travels as ``arrays`` is everything shared: weights, affine and running statistics, by state_dict name.
    """

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
        self.method, self.rounds, self.evaluate, self.save_clients = method, rounds, evaluate, save_clients
        self.callbacks = Callbacks(callbacks)
        self.shared, self.cohort, self.unseen = self.server.shared, list[Client](), dict[str, Tensor]()
        self.task = task
        self.population: Population | None = None
        self._evaluating, self._evaluations = list[Client](), EvaluationsAtClients(task, rounds.called)
        self._sent, self._down, self._timeout = list[Message](), Payload(), rounds.timeout
        self._batches = 0  # that a client trained on
        self._rounding = EXACT  # of the messages sent last
        self.defence, self.at_clients = defence, self.shared.personal or rounds.at_clients
        self.exchanges = Exchanges(rounds.exchange, self.shared.model, defence.average, not defence.active, rounds.called)
        self.disclosures = DisclosureReport(self.shared.model, method, rounds.called)
        self.secure = None if secure is None else self._secure_rounds(secure)
        accountant = None if self.secure is None else self.secure.accountant
        self.recovery = Recovery(save_clients, rounds.checkpoint_every, keep_checkpoint, accountant, rounds.called)
        self.statistics = Passes(self.server, self._measured, accountant is not None, self._measured_layer_by_layer)

    @property
    def record(self) -> RoundRecord:
        """Of the round that is under way, or was the last."""
        return self.server.record

    # The parts of a round, as Flower names them

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """One train message per client of the cohort, in client order."""
        self.shared.load(tensors_of(arrays))
        asked = self.server.begin(server_round)
        self._clients(grid).wait_for(self.rounds.min_cohort, server_round)
        self.cohort = self._clients(grid).cohort(self.rounds.fraction, self.rounds.seed, server_round, self.rounds.min_cohort)
        if owing := self.exchanges.owing(grid):
            who = self.rounds.called.clients(sorted(owing))
            log(logging.WARNING, "round %s: left out until an earlier round is answered: %s", server_round, who)
            self.cohort = [client for client in self.cohort if client.index not in owing]
        messages = self._messages("train", asked, self.cohort, self._train_config(config, asked))
        return self.recovery.tell(messages, self.cohort)

    def _train_config(self, config: Mapping[str, Any], asked: Instruction) -> dict[str, Any]:
        """``config`` of the train messages, and the round's learning rate."""
        share = {} if asked.rate_share == 1 else {"rate-share": asked.rate_share}
        return {**config, "learning-rate": asked.learning_rate, **share}

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, and leave the rest to the server's half of the round. ``(None, None)`` if too few were usable."""
        phase = Phase(self.record.phase)
        expected = self.server.expects(server_round, phase, {client.index: client.samples for client in self.cohort})
        header = header_for(self.shared, server_round, phase, self.rounds.payload)
        reading = Reading(self.cohort, with_header(header, expected, self.server.rounding), self._sent)
        came = self._taken_in(self._overheard(replies), reading)
        if phase is Phase.EXCHANGE:
            came.exchange, came.messages = self.exchanges.session, self.exchanges.messages
        done = self.server.conclude(came)
        counted = [part for part in came.parts if part.client in {c.client for c in self.record.accepted}]
        self.recovery.check(server_round, counted)
        if not done:
            return None, None
        self.recovery.count(server_round, counted)
        samples = sum(client.samples for client in self.record.accepted)
        return arrays_of(self.shared.tensors()), MetricRecord({"loss": self.record.loss, "samples": samples})

    def _taken_in(self, replies: Iterable[Decoded], reading: Reading) -> RoundReplies:
        """Replies to train messages, read; where they are not needed all at once, each is added to the average as it comes, and freed."""
        who = [client.index for client in self.cohort]
        if (intake := self.server.intake({client.index: client.samples for client in self.cohort})) is None:
            parts, refused, wrong = read_replies(replies, reading)
            return RoundReplies(who, parts, refused, wrong, carrier=self.exchanges.carrier)
        for reply in replies:
            found = reading.read(reply)
            del reply  # while the next one is waited for
            if isinstance(found, Reply):
                intake.take(found)
            elif found is not None:
                intake.leave_out(found)
            del found
        reading.end()
        parts, folded = intake.end()
        return RoundReplies(who, parts, reading.refused, reading.wrong, folded=folded)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """One evaluate message per client, where clients have models, or test data, of their own; none otherwise.

        Of clients with models of their own, the evaluations of those count that have trained. The others are asked where they save models.
        """
        if not self.at_clients or not self._due(server_round):
            return []
        self.shared.load(tensors_of(arrays))
        save = self.save_clients if server_round == self.server.rounds and self.shared.personal else ""
        asked = self.shared.instruction(server_round, Phase.TRAIN)
        everyone = self._clients(grid).everyone()
        self._evaluating = self._trained(everyone)
        if len(self._evaluating) < len(everyone):
            said = "round %s: %d of %d clients have trained so far, and evaluate models of their own"
            log(logging.INFO, said, server_round, len(self._evaluating), len(everyone))
        return self._messages("evaluate", asked, everyone if save else self._evaluating, {**config, "save": save})

    def _trained(self, clients: list[Client]) -> list[Client]:
        """Those of ``clients`` that have models of their own; all where nobody has one."""
        return [client for client in clients if self.method.personal and self.recovery.keeps(client.index)] or clients

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean, standard deviation and minimum of the clients' accuracies, each client counted once."""
        if not self.at_clients or not self._due(server_round) or self.population is None:
            return None
        header = header_for(self.shared, server_round, Phase.TRAIN)
        expected = Expected(header.round, header.signature, Schema({}), evaluated(self.task))
        reading = Reading(self._evaluating, with_header(header, expected), self._sent)
        noted = self.disclosures.evaluations(replies, self._everyone())
        return self._evaluations.in_the_clear(self.record, noted, reading)

    def _secure_rounds(self, settings: SecureAggregation) -> SecureRounds:
        from fl_bn.flower.secagg.rounds import SecureRounds  # only now: a plain run does without SecAgg+

        return SecureRounds(settings, self.server, self.disclosures.masked)

    def summary(self) -> None:
        """Log the policy, and every normalisation layer by type."""
        say_layers(self.server.source, self.shared.model, self.method)

    def save(self, path: str | Path) -> None:
        """The shared model as evaluated last, as safetensors, by the names of the unconverted network's state_dict: all of it, but for
        tensors that the clients keep. ``result.arrays`` has what travels alone."""
        save_file(self.shared.whole(self.shared.tensors(), self._batches), str(path))

    # The loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        resume: Checkpoint | None = None,
    ) -> Result:
        """Run ``num_rounds`` rounds from ``initial_arrays`` (default: the model's own tensors), or those after the one of ``resume``.

        The result's arrays are what was evaluated last. Flower's own loop (``Strategy.start``) runs with this strategy, too, but knows
        neither the length of a run, on which calendars and schedules depend, nor the exchange before an evaluation: use this one.

        With 0 rounds the statistics alone are measured, as ``rounds.calibrate`` says.

        Raises:
            RunFailed: clients are missing at the start, too many rounds in a row failed, or there is nothing to measure.
        """
        if simulated():
            from fl_bn.flower.app import lost_actors  # imports Ray

            lost_actors.repair()
        self.server.rounds, self.population = num_rounds, None
        if num_rounds == 0 and (reason := why_not(self.shared.model, self.method) or ("" if self.statistics.calibration(0) else NOTHING)):
            raise RunFailed(reason)
        timeout = self.rounds.timeout if timeout is None else timeout
        arrays = arrays_of(self.shared.tensors()) if initial_arrays is None else initial_arrays
        self.summary()
        if resume is not None:
            self.recovery.go_back(resume, num_rounds, self.shared, self.server.optimizer)
            if self.shared.statistics() and self.statistics.rescales(num_rounds):
                self.shared.was_at_unit_scale()
            arrays = arrays_of(self.shared.tensors())
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        try:
            result = self._rounds(grid, arrays, timeout, *configs, evaluate_fn, resume)
        except BaseException as error:
            self.exchanges.stop()
            self.callbacks.on_end(error)
            raise
        self.exchanges.stop()
        self.callbacks.on_end(None)
        return result

    def _rounds(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
        resume: Checkpoint | None,
    ) -> Result:
        result, failed = Result(), 0 if resume is None else resume.failed

        def show(measured: Measured) -> None:
            """Of a run of no rounds: its passes are evaluated and told of as rounds are."""
            self.server.record, result.arrays, number = measured.record, arrays_of(measured.tensors), measured.record.round
            if measured.last or number % self.rounds.evaluate_every == 0:
                self._evaluate(number, result, evaluate_config, evaluate_fn, grid, timeout)
            self._tell()

        self._clients(grid)
        self._timeout = timeout
        if self.shared.statistics() and resume is None:
            try:
                arrays = arrays_of(self.statistics.calibrated(tensors_of(arrays), self.server.rounds, show))
            except TooFewMeasured as error:
                raise RunFailed(str(error)) from error
        for server_round in range(1 if resume is None else resume.round + 1, self.server.rounds + 1):
            begin = time.perf_counter()
            messages = self.configure_train(server_round, arrays, train_config, grid)
            if self.secure is not None:
                new, metrics = self._securely(grid, messages, timeout)
            elif Phase(self.record.phase) is Phase.EXCHANGE:
                new, metrics = self.aggregate_train(server_round, self.exchanges.round(grid, self.cohort, messages, timeout))
            else:
                replies = receive(grid, messages, timeout, self.rounds.retry, called=self.rounds.called)
                new, metrics = self.aggregate_train(server_round, replies)
            if new is not None and metrics is not None:
                arrays, failed, result.train_metrics_clientapp[server_round] = new, 0, metrics
            else:
                failed += 1
            result.arrays = arrays
            if self._due(server_round) and failed < self.rounds.max_failed:
                if self.method.refresh is not Refresh.NOTHING and Phase(self.record.phase) is not Phase.FROZEN:
                    result.arrays = arrays_of(self.statistics.refreshed(server_round, tensors_of(result.arrays)))
                self._evaluate(server_round, result, evaluate_config, evaluate_fn, grid, timeout)
            if self.rounds.unseen and self.method.personal and server_round == self.server.rounds:
                clients, run_id = self._clients(grid), self.recovery.run_id
                who = self._trained(clients.everyone())
                self.unseen = average_kept(clients.grid, who, self.shared, server_round, self.rounds, run_id, self._overheard)
            self.record.seconds = time.perf_counter() - begin
            self._tell()
            self.recovery.after_round(server_round, self.server.rounds, arrays, self.shared, self.server.optimizer, failed)
            if failed >= self.rounds.max_failed:
                raise RunFailed(f"{failed} rounds in a row had too few usable replies; {WHY}")
        if 0 < self.server.rounds == failed:
            raise RunFailed(f"none of the {failed} rounds had enough usable replies, so nothing was trained; {WHY}")
        return result

    def _evaluate(
        self, server_round: int, result: Result, config: ConfigRecord, evaluate_fn: EvaluateFn | None, grid: Grid, timeout: float
    ) -> None:
        arrays = result.arrays
        asked = self.configure_evaluate(server_round, arrays, config, grid)
        send = partial(send_and_receive, grid, timeout=timeout, patience=self.rounds.retry, called=self.rounds.called)
        if self.secure is not None:
            at_clients = self._evaluations.as_a_sum(self.secure, grid, list(asked), self._evaluating, timeout, send)
        else:
            at_clients = self.aggregate_evaluate(server_round, send(asked))
        if at_clients is not None:
            result.evaluate_metrics_clientapp[server_round] = at_clients
            self.record.evaluation = {name: float(value) for name, value in at_clients.items() if isinstance(value, float)}
        elif self.evaluate is not None and not self.at_clients:
            self.shared.load(tensors_of(arrays))
            self.record.evaluation = self.evaluate(self.shared.model)
            result.evaluate_metrics_serverapp[server_round] = MetricRecord(dict(self.record.evaluation))
        if evaluate_fn is not None and (here := evaluate_fn(server_round, arrays)) is not None:
            result.evaluate_metrics_serverapp[server_round] = here

    def _clients(self, grid: Grid) -> Population:
        if self.population is None:
            self.population = self._population(grid)
            self.population.gather()
        return self.population

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.rounds, self.shared.signature, self.recovery.run_id.gone_back_to + 1)

    def _due(self, server_round: int) -> bool:
        return self.server.rounds in (0, server_round) or server_round % self.rounds.evaluate_every == 0

    def _measured(self, asked: Instruction) -> Exchanged:
        """A statistics-only exchange with everyone who is there, or with the round's cohort, as the method wants it."""
        grid, everyone = self._to_measure(asked)
        sent = self._messages(STATISTICS, asked, everyone, {"measured": asked.measured})
        who = [client.index for client in everyone]
        if self.secure is not None:
            parts, refused = self.secure.measure(grid, sent, everyone, self._timeout)
            return Exchanged(who, parts, refused, len(parts))
        replies = self._overheard(send_and_receive(grid, sent, self._timeout, self.rounds.retry, self.rounds.called))
        return self._stored(asked, who, *self._reports(replies, asked, everyone, sent))

    def _measured_layer_by_layer(self, asked: Instruction) -> Exchanged | None:
        """The same by one message and an exchange per layer; None where not everyone who has data took part to the end."""
        if self.secure is not None or self.method.adversary is not None or self.rounds.recalibration == "passes":
            return None
        exchanges, (grid, everyone) = self.exchanges, self._to_measure(asked)
        clients = [client for client in everyone if client.samples > 0]
        sent = self._messages(STATISTICS, asked, clients, {"measured": asked.measured}, steps=1 + len(self.shared.layers))
        tries = self.rounds.recalibration == "exchange"
        replies, carrier = exchanges.measure(grid, clients, sent, self._timeout, self.rounds.memory, tries)
        if not carrier:
            return None
        parts, refused, wrong = self._reports(self._overheard(replies, without_training=True), asked, clients, sent)
        missing = refused | {c.index: "it sat the exchange out" for c in clients if c.index not in exchanges.session.taking_part}
        if missing:
            index, reason = next(iter(sorted(missing.items())))
            log(logging.WARNING, "the exchange layer by layer went without %s: %s. %s", self.rounds.called.client(index), reason, BY_PASSES)
            return None
        empty = {client.index: "it has no samples" for client in everyone if client not in clients}
        done = self._stored(asked, [client.index for client in everyone], parts, empty, wrong)
        return replace(done, session=exchanges.session, carrier=carrier)

    def _to_measure(self, asked: Instruction) -> tuple[Grid, list[Client]]:
        assert self.population is not None
        return self.population.grid, self.cohort if self.method.measures_cohort(asked.round) else self.population.everyone()

    def _reports(
        self, replies: Iterable[Decoded], asked: Instruction, clients: Sequence[Client], sent: Sequence[Message]
    ) -> tuple[list[Reply], dict[int, str], set[int]]:
        expected = self.server.expects(asked.round, asked.phase, {client.index: client.samples for client in clients})
        header = header_for(self.shared, asked.round, asked.phase)
        return read_replies(replies, Reading(clients, with_header(header, expected), sent))

    def _stored(self, asked: Instruction, who: Sequence[int], parts: list[Reply], refused: dict[int, str], wrong: set[int]) -> Exchanged:
        """After the statistics of ``parts`` were stored, or too few came."""
        try:
            parts, overflowing = self.server.measured(parts, len(wrong), asked.measured)
        except TooFew as error:
            log(logging.WARNING, "the statistics stay as they are, since %s", error)
            return Exchanged(who, parts, refused, 0)
        return Exchanged(who, parts, refused | overflowing, len(parts))

    def _securely(self, grid: Grid, messages: Iterable[Message], timeout: float) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """A round of which the server sees the sum alone."""
        assert self.secure is not None
        done, parts = self.secure.train(grid, messages, self.cohort, timeout)
        self.recovery.check(self.record.round, parts)
        if not done:
            return None, None
        samples = sum(part.samples for part in parts)
        return arrays_of(self.shared.tensors()), MetricRecord({"loss": parts[0].loss, "samples": samples})

    def _messages(
        self, kind: str, asked: Instruction, clients: Sequence[Client], config: Mapping[str, Any], steps: int = 1
    ) -> list[Message]:
        """One per client. ``steps``: parts of the answer, each of which has the round's timeout.

        Raises:
            RunFailed: the weights do not fit the type in which they are to travel.
        """
        self._rounding = self.server.rounding if kind == "train" else EXACT
        try:
            self._down = self._rounding.narrow({section: to_numpy(tensors) for section, tensors in asked.sections.items()})
        except Overflow as error:
            raise RunFailed(str(error)) from error
        content = to_records(self._down, header_for(self.shared, asked.round, asked.phase, self._rounding.dtype))
        content["config"] = ConfigRecord({**config, "version": here(), **self.recovery.run_id.to_config()})
        group, ttl = str(asked.round), self.rounds.timeout * steps
        self._sent = [Message(RecordDict(dict(content.items())), client.node, kind, ttl=ttl, group_id=group) for client in clients]
        return self._sent

    def _overheard(self, replies: Iterable[Message], without_training: bool = False) -> Iterable[Decoded]:
        """The replies, decoded and noted, and then rewritten where the method's adversary has Byzantine clients, which know all others'."""
        clients = self._everyone()
        noted = self.disclosures.note(replies, clients, self.exchanges.session, self.record.round, without_training)
        if self.method.adversary is None or self.method.adversary.flips_labels:
            return noted
        return corrupt(list(noted), clients, self.rounds.clients, self.method.adversary, self.defence, self._down, self._rounding)

    def _everyone(self) -> list[Client]:
        return self.cohort if self.population is None else self.population.everyone()

    def _tell(self) -> None:
        self._batches += batches_trained([self.record])
        said = self.record, self.server.rounds, self.task
        called = self.rounds.called
        say_round(in_short(*said, called), describe_round(*said, self.method, self.shared.model, called))
        for warning in watch(self.record):
            log(logging.WARNING, "%s", warning)
        self.callbacks.on_round(self.disclosures.enter(self.record), self.server.rounds)
