"""Provide the strategies for a Flower app of your own, with Flower's own arguments and a method's options.

    strategy = FixBN(Net(), freeze_after=10, fraction_train=0.5)
    result = strategy.start(grid, initial_arrays, num_rounds=20, train_config=ConfigRecord({"lr": 0.1}))

Arguments of Flower's ``FedAvg`` that would have no effect here are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fl_bn.conversion import convert
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.callbacks import Callback
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.narrow import AS_THE_MODEL, check_payload
from fl_bn.federation.norm_layers import check_layers
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.payload import nbytes, signature, to_numpy
from fl_bn.federation.rounds import AS_METHOD, Rounds, constant_rate
from fl_bn.federation.schema import START
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import Instruction
from fl_bn.flower.evaluation import LogOnce
from fl_bn.flower.own.evaluation import NOT_COUNTED, RANGES, Ranges, evaluation_of_own_app
from fl_bn.flower.population import Introductions, Population, RunFailed
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.flower.wire.codec import to_record
from fl_bn.flower.wire.introductions import introduced
from fl_bn.flower.wire.messages import CLIENTS
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import PLAIN, Objective

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


RATES = ("lr", "learning_rate")
"""The names that a ``train_config`` may have for the clients' learning rate, in Flower's own examples and elsewhere."""


class _Rounds(BatchNormStrategy):
    """Run rounds in which clients evaluate with any metrics (``evaluation_of_own_app``).

    Args:
        args: as ``BatchNormStrategy``.
        evaluates: whether clients evaluate.
        ranges: the smallest and the largest value of a metric, by name.
        introductions: the nodes' introductions so far.
        options: as ``BatchNormStrategy``.
    """

    def __init__(self, *args: Any, evaluates: bool, ranges: Ranges, introductions: Introductions, **options: Any) -> None:
        super().__init__(*args, **options)
        self.evaluates, self.ranges, self.introductions = evaluates, ranges, introductions
        self._say = LogOnce(NOT_COUNTED, self.rounds.called)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort.

        A client without kept tensors gets their start along with the message. Your app builds its network anew,
        and not from the weights that the server has.
        """
        messages = [*super().configure_train(server_round, arrays, config, grid)]
        start = self.shared.start()
        self._started = {client.index: nbytes(start) for client in self.cohort if start and not self.recovery.keeps(client.index)}
        for message, client in zip(messages, self.cohort, strict=True):
            if client.index in self._started:
                message.content[START] = to_record(to_numpy(start[START]))
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies, and add the bytes of those starts to the round's record."""
        result, record = super().aggregate_train(server_round, replies), self.record
        if self._started:
            down = {**record.bytes_down, START: max(self._started.values())}
            clients = [replace(c, bytes_down=c.bytes_down + self._started.get(c.client, 0)) for c in record.clients]
            self.server.record = replace(record, bytes_down=down, clients=clients)
        return result

    def _train_config(self, config: Mapping[str, Any], instruction: Instruction) -> dict[str, Any]:
        """Multiply the rates in ``config`` by the method's share in frozen rounds. The clients' loops read them there."""
        values = super()._train_config(config, instruction)
        for name in RATES:
            if instruction.rate_share != 1 and isinstance(values.get(name), float):
                values[name] *= instruction.rate_share
        return values

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one evaluate message per client, if clients evaluate."""
        self.at_clients = self.evaluates
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; None without any."""
        if not self.evaluates:
            return None
        metrics = evaluation_of_own_app(
            self.disclosures.evaluations(replies, self.everyone()),
            self.evaluating,
            self._sent,
            self.ranges,
            say=self._say,
            alike=self.defence.active,
            called=self.rounds.called,
        )
        return MetricRecord({**metrics}) if metrics else None

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.rounds, self.shared.signature, introductions=self.introductions, clients_are_nodes=True)


class OwnAppStrategy(Strategy):
    """Train your model by a method, over a Flower app of your own.

    The app's ClientApp uses ``fl_bn.flower.answer`` and ``fl_bn.flower.training``.

    A node that claims another number of clients is refused, and the log names it. So is a node that cannot take
    part. The run goes on with the others, if there are at least ``min_available_nodes``.

    Args:
        model: your network, unconverted.
        method: the method, the same as the clients'.
        fraction_train: the share of the clients that train in a round, 0..1, as in Flower's ``FedAvg``.
        fraction_evaluate: 1: all clients evaluate; 0: none does.
        min_train_nodes: the smallest number of clients in a round.
        min_available_nodes: the smallest number of clients for the run to start.
        seed: decides the cohorts.
        rate: maps ``(round, rounds)`` to the learning rate, which FBN's tracking follows. Default: the rate
            that ``train_config`` names (``RATES``), from which your clients read theirs. In rounds with frozen
            statistics that rate falls, too (``Method.learning_rate``).
        calibrate: the number of statistics-only exchanges before round 1. -1: as many as make all layers exact;
            -2: as the method wants.
        unit_scale: whether the weights are rescaled after that.
        exchange: how FedTAN's exchange is carried.
        payload: the type in which weights travel while clients train: ``float32``, ``bfloat16`` or ``float16``.
            Default: the model's type.
        optimizer: steps on the average at the server. Default: the average itself.
        defence: the robust rules against Byzantine clients.
        objective: the objective that your ``training`` names. SCAFFOLD's control variates travel.
        callbacks: called after every round and at the end.
        clients: the number of clients, 0..100000. 0: the number that most nodes say (``num-partitions``).
        ranges: the smallest and the largest value of a metric that clients evaluate, by name.

    Raises:
        ValueError: an argument is out of its range, or the arguments do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_available_nodes: int = 2,
        seed: int = 0,
        rate: Callable[[int, int], float] = constant_rate,
        calibrate: int = AS_METHOD,
        unit_scale: bool = True,
        exchange: ExchangeSettings = ExchangeSettings(),  # noqa: B008 - frozen
        payload: str = AS_THE_MODEL,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
        objective: Objective = PLAIN,
        callbacks: Sequence[Callback] = (),
        clients: int = 0,
        ranges: Ranges = RANGES,
    ) -> None:
        if not 0 <= clients <= CLIENTS:
            raise ValueError(f"clients must be 0 (as many as most nodes say) .. {CLIENTS}, but got {clients}")
        if fraction_evaluate not in (0, 1):
            raise ValueError(f"fraction_evaluate must be 0 or 1: all clients evaluate, or none, but got {fraction_evaluate}")
        self.model, self.method, self.fraction_train, self.evaluates = model, method, fraction_train, bool(fraction_evaluate)
        self.min_train_nodes, self.min_available_nodes, self.seed, self.rate = min_train_nodes, min_available_nodes, seed, rate
        self.calibrate, self.unit_scale, self.exchange, self.payload = calibrate, unit_scale, exchange, payload
        self.optimizer, self.defence, self.callbacks = optimizer, defence, callbacks
        self.clients, self.ranges = clients, ranges
        self._settings = LocalTraining(batch_size=2, epochs=1, objective=objective)
        check_composition(method, self._settings, robust=defence.active)
        check_layers(model, method)
        check_payload(payload, method)
        self._rounds: _Rounds | None = None

    @property
    def rounds(self) -> BatchNormStrategy:
        """Return the strategy that runs the rounds.

        Raises:
            RunFailed: ``start`` was not called yet, so the clients are not known.
        """
        if self._rounds is None:
            raise RunFailed("the clients are not known before the start: call strategy.start(grid, ...) first")
        return self._rounds

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort."""
        return self.rounds.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies to the train messages."""
        return self.rounds.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one evaluate message per client, if clients evaluate."""
        return self.rounds.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics; None without any."""
        return self.rounds.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what the method does with every normalisation layer."""
        if self._rounds is not None:
            self._rounds.summary()

    def save(self, path: str | Path) -> None:
        """Save the model at the end of ``start`` as safetensors, as ``BatchNormStrategy.save`` does.

        Args:
            path: of the file.
        """
        self.rounds.save(path)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds, as Flower's ``Strategy.start`` does.

        Args:
            grid: Flower's grid.
            initial_arrays: the tensors to start from. Default: the model's own.
            num_rounds: the number of rounds, 0 or more.
            timeout: seconds for the clients to come, and for the replies of a round.
            train_config: values for every train message, such as ``lr``.
            evaluate_config: values for every evaluate message.
            evaluate_fn: evaluates at the server, too: ``evaluate_fn(round, arrays)``.

        Returns:
            Flower's result, with the arrays of the last evaluation.

        Raises:
            RunFailed: clients are missing, or their app does not answer. The message names the line that the
                app lacks.
        """
        wanted = signature(convert(self.model, self.method), self.method)
        clients, introductions = introduced(grid, self.min_available_nodes, timeout, wanted, self.clients)
        rate = self.rate
        if rate is constant_rate and (named := _named_rate(train_config)):
            rate = partial(_always, named)
        policy = Rounds(
            clients,
            self.fraction_train,
            timeout=timeout,
            at_start=min(self.min_available_nodes, clients),
            min_cohort=min(self.min_train_nodes, clients),
            seed=self.seed,
            rate=rate,
            calibrate=self.calibrate,
            unit_scale=self.unit_scale,
            auxiliary=auxiliary(self._settings),
            exchange=self.exchange,
            payload=self.payload,
        )
        self._rounds = _Rounds(
            self.model,
            self.method,
            policy,
            optimizer=self.optimizer,
            defence=self.defence,
            callbacks=self.callbacks,
            evaluates=self.evaluates,
            ranges=self.ranges,
            introductions=introductions,
        )
        return self._rounds.start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)


def _always(rate: float, round: int, rounds: int) -> float:
    return rate


def _named_rate(config: ConfigRecord | None) -> float:
    """Return the learning rate that ``config`` names; 0 without one."""
    values = [] if config is None else [config[name] for name in RATES if name in config]
    return next((value for value in values if isinstance(value, float) and value > 0), 0.0)


def _named(method: str) -> Callable[..., OwnAppStrategy]:
    def make(model: nn.Module, **options: Any) -> OwnAppStrategy:
        own = {name: options.pop(name) for name in [*options] if name in _OPTIONS}
        return OwnAppStrategy(model, METHODS[method](**options), **own)

    make.__doc__ = f"""Return a strategy that trains by ``{method}`` over a Flower app of your own.

    Args:
        model: your network, unconverted.
        options: the options of ``{method}`` (``fl_bn.methods``), and the arguments of ``OwnAppStrategy``, by name.
    """
    return make


_OPTIONS = set(OwnAppStrategy.__init__.__kwdefaults__ or {})
FedAvgBN, FixBN, FedBN, SiloBN, HBN, FBN, FedTAN, FedTAN2 = map(
    _named, ("fedavg", "fixbn", "fedbn", "silobn", "hbn", "fbn", "fedtan", "fedtan2")
)
