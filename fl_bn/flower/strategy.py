"""The strategy: one server loop for every method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from fl_bn.federation.aggregation import Drift, merge_drifts
from fl_bn.federation.defence import NO_DEFENCE, Defence, TooFew
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.rounds import Rounds
from fl_bn.flower import schema
from fl_bn.flower.adversary import corrupt
from fl_bn.flower.all_or_nothing import change_model, without_overflow
from fl_bn.flower.checkpoint import Checkpoint
from fl_bn.flower.codec import Header, Payload, count_tensors, to_records
from fl_bn.flower.departures import Departures
from fl_bn.flower.evaluation import evaluation_at_clients
from fl_bn.flower.exchanges import Exchanges, check_weights
from fl_bn.flower.ledger import enter
from fl_bn.flower.messages import TRAINED
from fl_bn.flower.normalisation import describe_round, say_layers, watch
from fl_bn.flower.population import Client, Population, RunFailed
from fl_bn.flower.posting import send_and_receive
from fl_bn.flower.recovery import Recovery
from fl_bn.flower.replies import read_replies, section_bytes
from fl_bn.flower.secure_rounds import SecureRounds
from fl_bn.flower.shared_model import SharedModel
from fl_bn.flower.statistics_exchange import Measured, StatisticsExchange
from fl_bn.flower.unseen import average_kept
from fl_bn.methods import Method, Phase, Refresh
from fl_bn.secure.settings import SecureAggregation
from fl_bn.task import CLASSIFICATION, Task

WHY = "the warnings above say why (values that are not finite mean that training diverged: lower the learning rate)"
NOTHING = "a run of 0 rounds measures statistics alone: set calibrate to -1, or to a number of passes"
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class BatchNormStrategy(Strategy):
    """Trains ``model`` by ``method`` over the clients of a grid.

    ``model`` is any torch network, unconverted; its tensors are the start of the run. ``optimizer`` steps on the pseudo-gradient of
    the shared weights (default: the average itself). ``observer`` gets every ``RoundRecord``; ``evaluate`` maps the global model to
    metrics. ``save_clients``: name of the run's folder, in which clients with models of their own save them at the end, none if empty.
    ``keep_checkpoint`` stores a ``Checkpoint`` and returns the oldest round that the run can still go back to. ``secure``: SecAgg+.
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
        observer: Callable[[RoundRecord], None] = lambda record: None,
        save_clients: str = "",
        defence: Defence = NO_DEFENCE,
        keep_checkpoint: Callable[[Checkpoint], int] | None = None,
        secure: SecureAggregation | None = None,
        task: Task = CLASSIFICATION,
    ) -> None:
        check_weights(method, rounds.client_weights)
        self.method, self.rounds, self.observer, self.evaluate, self.save_clients = method, rounds, observer, evaluate, save_clients
        self.source, self.shared = model, SharedModel(model, method, rounds.companions, rounds.clients)
        self.optimizer, self.task = optimizer or server_optimizer("fedavg"), task
        self.num_rounds, self.cohort, self.unseen = 1, list[Client](), dict[str, Tensor]()
        self.population: Population | None = None
        self.record = RoundRecord(0, Phase.TRAIN.value, 0.0)
        self._sent, self._down = list[Message](), self.shared.payload()
        self.defence, self.at_clients = defence, method.personal or rounds.at_clients
        self.exchanges = Exchanges(rounds.exchange, self.shared.model, defence.average, not defence.active)
        self.departures = Departures(self.shared.model, method)
        self.secure = None if secure is None else SecureRounds(secure, self.shared, rounds, defence, self.departures.masked)
        accountant = None if self.secure is None else self.secure.accountant
        self.recovery = Recovery(save_clients, rounds.checkpoint_every, keep_checkpoint, accountant)
        self.statistics = StatisticsExchange(self.shared, rounds, defence, self._messages, self._overheard, self.secure)

    # The parts of a round, as Flower names them

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """One train message per client of the cohort, in client order."""
        phase, rate = self.method.phase(server_round, self.num_rounds), self.rounds.rate(server_round, self.num_rounds)
        self._clients(grid).wait_for(self.rounds.min_cohort, server_round)
        self.cohort = self._clients(grid).cohort(self.rounds.fraction, self.rounds.seed, server_round, self.rounds.min_cohort)
        if owing := self.exchanges.owing(grid):
            log(logging.WARNING, "round %s: clients %s are left out until they answer an earlier round", server_round, sorted(owing))
            self.cohort = [client for client in self.cohort if client.index not in owing]
        self.shared.load(arrays)
        payload = self.shared.payload_to_train(self.optimizer)
        self.record = RoundRecord(server_round, phase.value, rate, tensors_down=count_tensors(payload), bytes_down=section_bytes(payload))
        header = self.shared.header(server_round, phase)
        return self.recovery.tell(self._messages("train", header, self.cohort, {**config, "learning-rate": rate}, payload), self.cohort)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check, average the weights, combine the statistics. ``(None, None)`` if too few replies were usable."""
        shared, record, phase = self.shared, self.record, Phase(self.record.phase)
        expected = schema.reply(shared.model, self.method, phase, self.rounds.update, self.rounds.companions)
        replies = self._overheard(replies)
        header, limit = shared.header(server_round, phase), self.rounds.max_steps
        contributions, refused, wrong = read_replies(replies, self.cohort, expected, header, TRAINED, self._sent, limit)
        low = {contributions[i].client.index: reason for i, reason in shared.undercut(contributions, phase).items()}
        contributions = [c for c in contributions if c.client.index not in low]
        refused, left = refused | low, self.defence.without(len(wrong | low.keys()))
        if phase is Phase.EXCHANGE:
            contributions = self.exchanges.taking_part(contributions, refused)
        before, pace = shared.statistics(), self.rounds.pace(record.learning_rate, self.num_rounds)
        change = partial(change_model, shared, self.optimizer, self.rounds, record, len(self.cohort), pace, left)
        try:
            contributions, overflowing, distances = without_overflow(contributions, change)
        except TooFew as error:
            enter(record, self.cohort, contributions, refused, self.exchanges)
            self.recovery.check(server_round, contributions)
            log(logging.WARNING, "round %s: %s", server_round, error)
            return None, None
        enter(record, self.cohort, contributions, refused | overflowing, self.exchanges)
        self.recovery.check(server_round, contributions)
        record.aggregated = True
        record.measure(distances)
        self.recovery.count(server_round, contributions)
        after = shared.statistics()
        drifts = [c.local_drift(list(shared.layers)) for c in contributions]
        record.drift = Drift.between(before, after) or merge_drifts(drift for drift in drifts if drift is not None)
        return shared.arrays(), MetricRecord({"loss": record.loss, "samples": sum(c.samples for c in contributions)})

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """One evaluate message per client, where clients have models, or test data, of their own; none otherwise."""
        if not self.at_clients or not self._due(server_round):
            return []
        self.shared.load(arrays)
        save = self.save_clients if server_round == self.num_rounds and self.method.personal else ""
        header = self.shared.header(server_round, Phase.TRAIN)
        return self._messages("evaluate", header, self._clients(grid).everyone(), {**config, "save": save})

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean, standard deviation and minimum of the clients' accuracies, each client counted once."""
        if not self.at_clients or not self._due(server_round) or self.population is None:
            return None
        header = self.shared.header(server_round, Phase.TRAIN)
        return evaluation_at_clients(self.record, replies, self.population.everyone(), header, self._sent, self.task)

    def summary(self) -> None:
        """Log the policy, and every normalisation layer by type."""
        say_layers(self.source, self.shared.model, self.method)

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
        self.num_rounds, self.population = num_rounds, None
        if num_rounds == 0 and (reason := why_not(self.shared.model, self.method) or ("" if self.statistics.calibration(0) else NOTHING)):
            raise RunFailed(reason)
        timeout = self.rounds.timeout if timeout is None else timeout
        arrays = self.shared.arrays() if initial_arrays is None else initial_arrays
        self.summary()
        if resume is not None:
            self.recovery.go_back(resume, num_rounds, self.shared, self.optimizer)
            arrays = self.shared.arrays()
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        try:
            return self._rounds(grid, arrays, timeout, *configs, evaluate_fn, resume)
        finally:
            self.exchanges.stop()

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
            self.record, result.arrays, number = measured.record, measured.arrays, measured.record.round
            if measured.last or number % self.rounds.evaluate_every == 0:
                self._evaluate(number, result, evaluate_config, evaluate_fn, grid, timeout)
            self._tell()

        population = self._clients(grid)
        if self.shared.statistics() and resume is None:
            arrays = self.statistics.calibrated(arrays, population, timeout, self.num_rounds, show)
        for server_round in range(1 if resume is None else resume.round + 1, self.num_rounds + 1):
            begin = time.perf_counter()
            messages = self.configure_train(server_round, arrays, train_config, grid)
            if self.secure is not None:
                about = self.cohort, self.record, self.optimizer, self.recovery, timeout, self.num_rounds
                new, metrics = self.secure.train(grid, messages, *about)
            elif Phase(self.record.phase) is Phase.EXCHANGE:
                new, metrics = self.aggregate_train(server_round, self.exchanges.round(grid, self.cohort, messages, timeout))
            else:
                new, metrics = self.aggregate_train(server_round, send_and_receive(grid, messages, timeout, self.rounds.retry))
            if new is not None and metrics is not None:
                arrays, failed, result.train_metrics_clientapp[server_round] = new, 0, metrics
            else:
                failed += 1
            result.arrays = arrays
            if self._due(server_round) and failed < self.rounds.max_failed:
                if self.method.refresh is not Refresh.NOTHING and Phase(self.record.phase) is not Phase.FROZEN:
                    result.arrays = self.statistics.refreshed(server_round, result.arrays, self._clients(grid), timeout)
                self._evaluate(server_round, result, evaluate_config, evaluate_fn, grid, timeout)
            if self.rounds.unseen and self.method.personal and server_round == self.num_rounds:
                clients, lineage = self._clients(grid), self.recovery.lineage
                self.unseen = average_kept(clients, self.shared, server_round, self.rounds, lineage, self._overheard)
            self.record.seconds = time.perf_counter() - begin
            self._tell()
            self.recovery.after_round(server_round, self.num_rounds, arrays, self.shared, self.optimizer, failed)
            if failed >= self.rounds.max_failed:
                raise RunFailed(f"{failed} rounds in a row had too few usable replies; {WHY}")
        if 0 < self.num_rounds == failed:
            raise RunFailed(f"none of the {failed} rounds had enough usable replies, so nothing was trained; {WHY}")
        return result

    def _evaluate(
        self, server_round: int, result: Result, config: ConfigRecord, evaluate_fn: EvaluateFn | None, grid: Grid, timeout: float
    ) -> None:
        arrays = result.arrays
        replies = send_and_receive(grid, self.configure_evaluate(server_round, arrays, config, grid), timeout, self.rounds.retry)
        if (at_clients := self.aggregate_evaluate(server_round, replies)) is not None:
            result.evaluate_metrics_clientapp[server_round] = at_clients
            self.record.evaluation = {name: float(value) for name, value in at_clients.items() if isinstance(value, float)}
        elif self.evaluate is not None and not self.at_clients:
            self.shared.load(arrays)
            self.record.evaluation = self.evaluate(self.shared.model)
            result.evaluate_metrics_serverapp[server_round] = MetricRecord(dict(self.record.evaluation))
        if evaluate_fn is not None and (here := evaluate_fn(server_round, arrays)) is not None:
            result.evaluate_metrics_serverapp[server_round] = here

    def _clients(self, grid: Grid) -> Population:
        if self.population is None:
            self.population = Population(grid, self.rounds, self.shared.signature, self.recovery.lineage.gone_back_to + 1)
            self.population.gather()
        return self.population

    def _due(self, server_round: int) -> bool:
        return self.num_rounds in (0, server_round) or server_round % self.rounds.evaluate_every == 0

    def _messages(
        self, kind: str, header: Header, clients: Sequence[Client], config: Mapping[str, Any], payload: Payload | None = None
    ) -> list[Message]:
        self._down = payload or self.shared.payload()
        content = to_records(self._down, header)
        content["config"] = ConfigRecord({**config, **self.recovery.lineage.to_config()})
        group, ttl = str(header.round), self.rounds.timeout
        self._sent = [Message(RecordDict(dict(content.items())), client.node, kind, ttl=ttl, group_id=group) for client in clients]
        return self._sent

    def _overheard(self, replies: Iterable[Message]) -> list[Message]:
        """The replies, noted, and then rewritten where the method's adversary has Byzantine clients."""
        replies, clients = list(replies), self.cohort if self.population is None else self.population.everyone()
        self.departures.note(replies, clients, self.exchanges.session, self.record.round)
        if self.method.adversary is not None:
            momentum = {name: layer.momentum for name, layer in self.shared.layers.items()}
            corrupt(replies, clients, self.rounds.clients, self.method.adversary, self.defence, self._down, momentum)
        return replies

    def _tell(self) -> None:
        log(logging.INFO, "%s", describe_round(self.record, self.num_rounds, self.method, self.shared.model, self.task))
        for warning in watch(self.record):
            log(logging.WARNING, "%s", warning)
        self.observer(self.departures.enter(self.record))
