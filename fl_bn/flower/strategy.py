"""Run any method's rounds over a Flower grid, as a Flower strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_bn.federation.callbacks import Callback, Callbacks, Running
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.divergence import why_failed
from fl_bn.federation.intake import streaming
from fl_bn.federation.narrow import EXACT, Overflow
from fl_bn.federation.newest import Newest
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.passes import Measured, Passes, TooFewMeasured
from fl_bn.federation.payload import Named, Payload, to_numpy
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.federation.replies import Expected
from fl_bn.federation.rounds import Rounds, exchanges_in_rounds
from fl_bn.federation.run import Diverged, Start, run
from fl_bn.federation.schema import Schema
from fl_bn.federation.server import Server
from fl_bn.federation.values import Instruction, Reply, RoundReplies
from fl_bn.flower.app.adversary import corrupt
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.app.disclosure import DisclosureReport
from fl_bn.flower.app.normalisation import describe_round, in_short, say_layers
from fl_bn.flower.app.recovery import Recovery
from fl_bn.flower.compat import simulated
from fl_bn.flower.deployment import Progress
from fl_bn.flower.evaluation import EvaluationsAtClients
from fl_bn.flower.grid_transport import EvaluateFn, GridTransport
from fl_bn.flower.hooks import RunResult, check_secure, check_unwrapped
from fl_bn.flower.layerwise.exchanges import Exchanges
from fl_bn.flower.log import log, say_round
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.starts import Starts
from fl_bn.flower.subclassing import HOOKS, OwnNames
from fl_bn.flower.wire.codec import arrays_of, header_for, tensors_of, to_records
from fl_bn.flower.wire.fields import add_to_config
from fl_bn.flower.wire.messages import evaluated
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies, with_header
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Method, Phase
from fl_bn.secure.settings import SecureAggregation
from fl_bn.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from fl_bn.flower.secagg.rounds import SecureRounds

NOTHING = "a run of 0 rounds only measures statistics: set calibrate to -1, or to a number of passes (now it asks for none)"


class BatchNormStrategy(OwnNames):
    """Train a model by a method over the clients of a grid.

    A subclass may override the hooks ``configure_train``, ``aggregate_train``, ``configure_evaluate``,
    ``aggregate_evaluate``, ``summary``, ``start`` and ``save``, and call ``super()`` in them. A subclass that defines
    any other name of this class is refused with a TypeError.

    The hooks' argument ``arrays`` holds all shared tensors by state_dict name: weights, affine parameters and statistics.

    Args:
        model: any torch network, unconverted. The run starts from its tensors.
        method: the method, the same as the clients'.
        rounds: the server's settings for rounds.
        optimizer: steps on the pseudo-gradient of the shared weights. Default: the average becomes the new model.
        evaluate: maps the global model to metrics, at the server.
        callbacks: called at the start, after every round and at the end.
        save_clients: the name of the run's folder, in which clients with models of their own save these at the
            end. Empty: they save none.
        defence: the robust rules for statistics and updates. The statistics' rule serves the layer-wise
            exchange (FedTAN), too.
        keep_checkpoint: stores a ``Checkpoint``, and returns the oldest round that the run can still go back
            to.
        secure: the settings of secure aggregation (SecAgg+). None: updates travel in the clear.
        task: the task whose metrics clients evaluate, and the log shows.

    Raises:
        ValueError: arguments contradict each other.
    """

    configrecord_key = "config"
    """The name of the user's config in a message."""
    open_names = (*HOOKS, "save", "configrecord_key")

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
        self.running, self.progress = Running(task, self._arrays), Progress(None)
        self.population: Population | None = None
        self.told, self.evaluating = list[Client](), list[Client]()  # clients that got an evaluate message, and clients whose metrics count
        self.evaluations = EvaluationsAtClients(task, rounds.called)
        self.sent, self._down = list[Message](), Payload()
        self.starts = Starts(self.shared)
        self.batches_trained = 0  # the number of batches that a client has trained on
        self._newest: Newest | None = None  # None before ``start``
        self._rounding = EXACT  # the rounding of the messages that were sent last
        self.defence, self.at_clients = defence, self.shared.personal or rounds.at_clients
        self.exchanges = Exchanges(
            rounds.exchange, self.shared.model, self.shared.exchanged(), defence.average, not defence.active, rounds.called
        )
        self.disclosures = DisclosureReport(self.shared.model, self.shared.locality, rounds.called)
        self.secure = None if secure is None else self._secure_rounds(secure)
        accountant = None if self.secure is None else self.secure.accountant
        self.recovery = Recovery(save_clients, rounds.checkpoint_every, keep_checkpoint, accountant, rounds.called)
        self.statistics = Passes(self.server, accountant is not None)

    @property
    def record(self) -> RoundRecord:
        """Return the record of the current round, or of the last one."""
        return self.server.record

    def outward(self, tensors: Named) -> ArrayRecord:
        """Convert shared ``tensors`` to the arrays that the hooks and Flower's result get."""
        return arrays_of(tensors)

    def inward(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Convert arrays that a hook returned to tensors with the shared model's names: the inverse of ``outward``."""
        return tensors_of(arrays)

    # The parts of a round, as Flower names them

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort, in client order.

        Args:
            server_round: the round's number, from 1.
            arrays: the shared tensors.
            config: values for every message.
            grid: Flower's grid.
        """
        if self.population is None:  # a loop of Flower's own runs this, not ``start``
            check_unwrapped(self, self.method)
        self.shared.load(self.inward(arrays))
        instruction = self.server.begin(server_round)
        self.clients_of(grid).wait_for(self.rounds.min_cohort, server_round)
        self.cohort = self.clients_of(grid).cohort(self.rounds.fraction, self.rounds.seed, server_round, self.rounds.min_cohort)
        if late := self.exchanges.late_clients(grid):
            who = self.rounds.called.clients(sorted(late))
            log(logging.WARNING, "round %s leaves out %s, since replies to an earlier round are missing", server_round, who)
            self.cohort = [client for client in self.cohort if client.index not in late]
        share = {} if instruction.rate_share == 1 else {"rate-share": instruction.rate_share}
        told = {"objective": instruction.objective} if instruction.objective else {}
        values = {"learning-rate": instruction.learning_rate, **share, **told}
        messages = self.messages("train", instruction, self.cohort, values, self._their_config(config, instruction))
        self.starts.add(messages, self.cohort, self.recovery.keeps)
        return self.recovery.tell(messages, self.cohort)

    def _their_config(self, config: Mapping[str, Any], instruction: Instruction) -> dict[str, Any]:
        """Return the values of the user's config in a round's messages: here ``config``, unchanged."""
        return {**config}

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Read the replies, and combine them into the new shared model, as the method says.

        Args:
            server_round: the round's number.
            replies: the replies to the train messages.

        Returns:
            The shared tensors, and the metrics ``loss`` and ``samples``; ``(None, None)`` if too few replies are usable.
        """
        phase = Phase(self.record.phase)
        expected = self.server.expects(server_round, phase, {client.index: client.samples for client in self.cohort})
        header = header_for(self.shared, server_round, phase, self.rounds.payload)
        reading = Reading(self.cohort, with_header(header, expected, self.server.rounding), self.sent)
        round_replies = self._read_replies(self.overheard(replies), reading)
        changed = self.server.conclude(round_replies)
        self.server.record = self.starts.counted(self.record)
        accepted = {client.client for client in self.record.accepted}
        counted = [part for part in round_replies.parts if part.client in accepted]
        self.recovery.check(server_round, counted)
        if not changed:
            return None, None
        self.recovery.count(server_round, counted)
        samples = sum(client.samples for client in self.record.accepted)
        return self.outward(self.shared.tensors()), MetricRecord({"loss": self.record.loss, "samples": samples})

    def _read_replies(self, replies: Iterable[Decoded], reading: Reading) -> RoundReplies:
        """Check the replies to train messages.

        If the method does not need all replies at once, add each to the average immediately, and free its memory.
        """
        who = [client.index for client in self.cohort]
        if (intake := streaming(self.server, {client.index: client.samples for client in self.cohort})) is None:
            parts, refused, wrong = read_replies(replies, reading)
            if Phase(self.record.phase) is not Phase.EXCHANGE:
                return RoundReplies(who, parts, refused, wrong)
            exchanges = self.exchanges
            return RoundReplies(who, parts, refused, wrong, exchanges.session, exchanges.carrier, exchanges.messages)
        for decoded in replies:
            reply = reading.read(decoded)
            del decoded  # frees its memory while the loop waits for the next reply
            if isinstance(reply, Reply):
                intake.take(reply)
            elif reply is not None:
                intake.leave_out(reply)
            del reply
        reading.end()
        parts, partial = intake.end()
        return RoundReplies(who, parts, reading.refused, reading.wrong, partial=partial)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one evaluate message per client if clients have models or test data of their own; none otherwise.

        In a round in which no evaluation is due, there are no messages either.

        If clients have models of their own, only clients that have trained evaluate. The others get a message only
        if models are to be saved.

        Args:
            server_round: the round's number.
            arrays: the shared tensors.
            config: values for every message.
            grid: Flower's grid.
        """
        self.told = list[Client]()
        if not self.at_clients or not self._due(server_round):
            return []
        self.shared.load(self.inward(arrays))
        save = self.save_clients if server_round == self.server.rounds and self.shared.personal else ""
        instruction = self.shared.instruction(server_round, Phase.TRAIN)
        everyone = self.clients_of(grid).everyone()
        have_models = self.with_models(everyone)
        if len(have_models) < len(everyone):
            line = "round %s: %d of %d clients have trained so far, and evaluate models of their own"
            log(logging.INFO, line, server_round, len(have_models), len(everyone))
        self.evaluating = self.evaluators_of(server_round, have_models, len(everyone))
        self.told = everyone if save else self.evaluating
        messages = self.messages(
            "evaluate", instruction, self.told, {"save": save} if save else {}, self._their_config(config, instruction)
        )
        self.starts.add(messages, self.told, self.recovery.keeps)
        return messages

    def evaluators_of(self, server_round: int, clients: list[Client], population: int) -> list[Client]:
        """Return those of ``clients`` that evaluate in this round: by default, all. ``population`` is the number of all clients."""
        return clients

    def with_models(self, clients: list[Client]) -> list[Client]:
        """Return the clients that have stored tensors of their own, so that their models differ; all clients if none has."""
        return [client for client in clients if self.method.personal and self.recovery.keeps(client.index)] or clients

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean, standard deviation and worst value of the clients' metrics, each client counted once.

        Args:
            server_round: the round's number.
            replies: the replies to the evaluate messages.

        Returns:
            The metrics; None if clients do not evaluate in this round, or if none sent a valid metric.
        """
        if not self.at_clients or not self._due(server_round) or self.population is None:
            return None
        header = header_for(self.shared, server_round, Phase.TRAIN)
        expected = Expected(header.round, header.signature, Schema({}), evaluated(self.task))
        reading = Reading(self.evaluating, with_header(header, expected), self.sent)
        decoded = self.disclosures.evaluations(replies, self.everyone())
        metrics, by_client = self.evaluations.in_the_clear(decoded, reading)
        self.server.record = replace(self.record, client_evaluation=by_client)
        return metrics

    def _secure_rounds(self, settings: SecureAggregation) -> SecureRounds:
        from fl_bn.flower.secagg.rounds import SecureRounds  # imported only now, since a plain run needs no SecAgg+

        return SecureRounds(settings, self.server, self.disclosures.masked)

    def _arrays(self) -> dict[str, Tensor]:
        """Return the tensors of the shared model that was evaluated last, for callbacks."""
        return self.shared.whole(self._evaluated, self.batches_trained + batches_trained(self.running.history))

    @property
    def _evaluated(self) -> Named:
        """Return name -> shared tensor of the model as evaluated last. Before ``start``, and in a loop of your own: as it is now."""
        return self.shared.tensors() if self._newest is None else self._newest.tensors

    def summary(self) -> None:
        """Log what the method does with every normalisation layer."""
        say_layers(self.server.source, self.shared.model, self.method)

    def save(self, path: str | Path) -> None:
        """Save the shared model of the last evaluation as safetensors, by the names of the unconverted network's state_dict.

        The file has all tensors except those that the clients keep. ``result.arrays`` has only the tensors that are sent.

        Args:
            path: the path of the file.
        """
        save_file(self.shared.whole(self._evaluated, self.batches_trained), str(path))

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
        hooks: Strategy | None = None,
    ) -> RunResult:
        """Run the rounds. With ``num_rounds=0``, only measure the statistics, as ``rounds.calibrate`` says.

        Flower's own loop (``Strategy.start``) runs with this strategy, too. But it does not know the number of
        rounds, on which a method's phases and the learning rate may depend. And it does not run the
        statistics-only exchange before an evaluation. So use this ``start``.

        Args:
            grid: Flower's grid.
            initial_arrays: the tensors to start from. Default: the model's own.
            num_rounds: the number of rounds, 0 or more.
            timeout: how many seconds to wait for the replies of a round. Default: that of ``rounds``.
            train_config: values for every train message.
            evaluate_config: values for every evaluate message.
            evaluate_fn: evaluates at the server, besides the clients: ``evaluate_fn(round, arrays)``, from round
                0 on. The arrays load into the network by ``load_state_dict``. If clients keep their BatchNorm
                layers, the arrays have the average over the clients that send theirs.
            resume: a checkpoint. The run goes on after its round.
            hooks: the strategy whose hooks are called. Default: this one.

        Returns:
            Flower's result, with the arrays of the last evaluation and every round's record.

        Raises:
            RunFailed: clients are missing at the start, too many rounds in a row failed, or there is nothing to
                measure. Or the method exchanges statistics within rounds by a carrier that cannot serve this grid.
            ValueError: ``initial_arrays`` do not fit the network, or ``check_secure`` refuses the hooks.
        """
        if simulated():
            from fl_bn.flower.app import lost_actors  # imports Ray

            lost_actors.repair()
        hooks = self if hooks is None else hooks
        if self.secure is not None:
            check_secure(hooks)
        if exchanges_in_rounds(self.method):
            self.exchanges.check(grid)
        self.server.rounds, self.population = num_rounds, None
        if num_rounds == 0 and (reason := why_not(self.shared.model, self.method) or ("" if self.statistics.calibration(0) else NOTHING)):
            raise RunFailed(reason)
        hooks.summary()
        self.running.reason = ""
        self.progress = Progress.of(grid)
        if hooks is self:  # else an own app's strategy has begun it
            self.progress.begin(num_rounds)
        if resume is not None:
            self.recovery.go_back(resume, num_rounds, self.shared, self.server.optimizer)
            if self.shared.statistics() and self.statistics.rescales(num_rounds):
                self.shared.was_at_unit_scale()
        elif initial_arrays is not None:
            self.starts.begin_with(initial_arrays)
        begin = Start() if resume is None else Start(resume.round + 1, resume.failed)
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        transport = GridTransport(self, grid, self.rounds.timeout if timeout is None else timeout, *configs, evaluate_fn, hooks)
        self._newest = Newest(self.shared.tensors(), begin.round - 1, begin.round - 1)
        try:
            self.callbacks.on_start(self.running)
            self._run(transport, num_rounds, begin)
        except BaseException as error:
            self.exchanges.stop()
            self._newest.say(self.method)
            self.callbacks.on_end(error)
            raise
        self.exchanges.stop()
        self.callbacks.on_end(None)
        return transport.result

    def _run(self, transport: GridTransport, rounds: int, begin: Start) -> None:
        """Run all rounds (``federation.run``), and report every round at its end."""
        server, result, failed = self.server, transport.result, begin.failed
        assert self._newest is not None
        newest = self._newest

        def show(measured: Measured) -> None:
            """Evaluate after a statistics-only exchange, and report it like a round. Called only in a run of 0 rounds."""
            server.record, result.arrays, number = measured.record, self.outward(measured.tensors), measured.record.round
            newest.take(0, measured.tensors)
            if measured.last or number % self.rounds.evaluate_every == 0:
                evaluation = transport.evaluate(number, measured.tensors)
                server.record = replace(server.record, evaluation=evaluation)
            self._tell(server.record)

        self.clients_of(transport.grid)
        result.arrays = self.outward(self.shared.tensors())
        if begin.round == 1 and rounds:
            transport.evaluate_here(0, self.shared.tensors())
        try:
            for one in run(server, transport, rounds, self.statistics, begin, show):
                newest.take(one.record.round, one.evaluated)  # for the callbacks, which get this round next
                result.records.append(self._tell(one.record))
                result.arrays, failed = self.outward(newest.tensors), one.failed
                if self.running.reason and one.record.round < rounds:
                    log(logging.INFO, "the run ends after round %s of %s: %s", one.record.round, rounds, self.running.reason)
                    newest.say(self.method)
                    transport.end_early(one.record.round, newest.tensors)
                    break
                state = arrays_of(one.tensors)
                self.recovery.after_round(one.record.round, rounds, state, self.shared, server.optimizer, failed)
        except TooFewMeasured as error:
            raise RunFailed(str(error)) from error
        except Diverged as error:
            raise RunFailed(str(error)) from error
        if 0 < rounds == failed:
            raise RunFailed(f"none of the {failed} rounds had enough usable replies, so nothing was trained. {why_failed(self.record)}")

    def clients_of(self, grid: Grid) -> Population:
        """Return the run's ``Population`` of clients. The first call waits for the clients with which the run starts."""
        if self.population is None:
            self.population = self._population(grid)
            self.population.gather()
        return self.population

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.rounds, self.shared.signature, self.recovery.run_id.gone_back_to + 1)

    def _due(self, server_round: int) -> bool:
        return self.server.rounds in (0, server_round) or server_round % self.rounds.evaluate_every == 0

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
        group, ttl = str(instruction.round), self.rounds.timeout * steps
        self.sent = [Message(RecordDict(dict(content.items())), client.node, kind, ttl=ttl, group_id=group) for client in clients]
        for message in self.sent if config is not None else ():  # each message has its own copy, which its client or a hook may change
            message.content[self.configrecord_key] = ConfigRecord({**(config or {}), "server-round": instruction.round})
        return self.sent

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
        return corrupt(list(decoded), clients, self.rounds.clients, self.method.adversary, self.defence, self._down, self._rounding)

    def everyone(self) -> list[Client]:
        """Return all connected clients that may train. As long as ``start`` has not found the clients, return the cohort."""
        return self.cohort if self.population is None else self.population.everyone()

    def _tell(self, record: RoundRecord) -> RoundRecord:
        """Log the result of a round, call the callbacks, and return the record with its disclosures."""
        self.batches_trained += batches_trained([record])
        rounds, called = self.server.rounds, self.rounds.called
        long = describe_round(record, rounds, self.task, self.method, self.shared.model, called)
        say_round(in_short(record, rounds, self.task, called), long)
        complete = self.disclosures.enter(record)
        self.callbacks.on_round(complete, rounds)
        self.progress.on_round(complete, rounds)
        return complete
