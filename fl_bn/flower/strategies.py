"""Provide the strategy for a Flower app of your own, and one strategy per method, by name.

    strategy = FixBN(Net(), freeze_after=10, fraction_train=0.5)
    result = strategy.start(grid, initial_arrays, num_rounds=20, train_config=ConfigRecord({"lr": 0.1}))

They have Flower's arguments, hooks and ``start``. They are classes: a subclass may override hooks, as with Flower's ``FedAvg``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from torch import nn

from fl_bn.bn.conversion import check_kinds, convert
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.callbacks import Callback, checked_callbacks
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.federation.narrow import AS_THE_MODEL, check_payload
from fl_bn.federation.network import Network
from fl_bn.federation.norm_layers import check_layers
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.rounds import AS_METHOD, Rounds, constant_rate
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.compat import log
from fl_bn.flower.deployment import called_in
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.flower.hooks import EXAMPLES, Combine, NamedRates, OwnApp, OwnMetrics, is_number
from fl_bn.flower.population import RunFailed, meet
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.flower.wire.fields import OURS
from fl_bn.flower.wire.messages import CLIENTS
from fl_bn.methods import METHODS, Method
from fl_bn.objectives import PLAIN, Objective
from fl_bn.options import options_by_key
from fl_bn.support.client_names import ClientNames
from fl_bn.support.names import check_name

TIMEOUT = 3600.0  # Flower's


class OwnAppStrategy(BatchNormStrategy):
    """Train your model by a method, over a Flower app of your own.

    The app's ClientApp uses ``fl_bn.flower.answer`` and ``fl_bn.flower.training``.

    A subclass may override hooks, as with ``BatchNormStrategy``. The arrays that a hook gets have the names of your network's
    state_dict. Tensors that clients keep are not among them. Names that begin with ``_``, and ``transport``, are fl-bn's; all
    other names are yours.

    A node that names another number of clients than the run has, or that cannot take part, is refused, and the log names
    it. The run goes on with the others, if there are at least ``min_available_nodes``.

    Args:
        model: your network, unconverted.
        method: the method, the same as the clients'.
        fraction_train: the share of the clients that train in a round, in (0, 1], as in Flower's ``FedAvg``. A subclass may set this
            and Flower's other arguments, as attributes of these names, until ``start`` is called.
        fraction_evaluate: the share of the clients that evaluate in a round, 0..1. 0: nobody evaluates.
        min_train_nodes: the smallest number of clients in a round.
        min_evaluate_nodes: the smallest number of clients that evaluate, unless nobody does.
        min_available_nodes: the smallest number of clients for the run to start.
        weighted_by_key: the metric by which a client is weighted in the means of metrics. In the average of the model,
            a client is weighted by the ``samples`` that it passes to ``round.message``.
        arrayrecord_key: must be ``arrays``. It has no effect, since ``training`` loads the arrays.
        configrecord_key: the name of the record that ``train_config`` and ``evaluate_config`` become.
        train_metrics_aggr_fn: ``f(records, weighted_by_key)`` combines the clients' own training metrics.
            Default: means. The records hold only metrics.
        evaluate_metrics_aggr_fn: combines the clients' evaluations in the same way.
        seed: the seed that decides the cohorts.
        rate: maps ``(round, rounds)`` to the learning rate. FBN's shared statistics move more slowly as this rate falls.
            Default: the rate that ``train_config`` names (``RATES``), which your clients read, too. A hook may change
            this rate in the config of any round. In rounds with frozen statistics, the clients get a lower rate
            (``Method.learning_rate``).
        calibrate: the number of statistics-only exchanges before round 1. -1: as many as make all layers exact;
            -2: like -1 if the method needs exact statistics, otherwise none.
        unit_scale: whether the weights are rescaled after this calibration (``federation.unit_scale``).
        exchange: the settings of FedTAN's layer-wise exchange.
        payload: the dtype in which weights are sent while clients train: ``float32``, ``bfloat16`` or ``float16``.
            Default: the model's dtype.
        optimizer: steps on the pseudo-gradient at the server. Every ``start`` takes a copy without earlier momentum. Default: the
            average becomes the new model.
        defence: the robust rules against Byzantine clients.
        objective: the objective that your ``training`` uses. SCAFFOLD needs it here, too, because the server sends control
            variates. If it is given, clients with another one raise an error.
        callbacks: called at the start, after every round and at the end of ``start``.
        client_weights: a client's weight in averages: ``samples``, or ``uniform``, which counts every client once (as FedBN's paper).
        clients: the number of clients, 0..100000. 0: the value of ``num-partitions`` that most nodes report.

    Raises:
        ValueError: an argument is out of its range, ``callbacks`` is no list of callbacks, or arguments contradict each other.
        TypeError: ``model``, ``method``, ``optimizer``, ``defence``, ``objective`` or ``exchange`` is of another type.
    """

    _given: Given | None = None  # None: this strategy has ``Rounds``, and runs fl-bn's own ClientApp

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Combine | None = None,
        evaluate_metrics_aggr_fn: Combine | None = None,
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
        client_weights: str = "samples",
        clients: int = 0,
    ) -> None:
        self._given = Given(
            model, method, seed, rate, calibrate, unit_scale, exchange, payload, optimizer, defence, objective,
            checked_callbacks(callbacks), client_weights, clients,
        )  # fmt: skip
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate  # by Flower's names, as its FedAvg has them
        self.min_train_nodes, self.min_evaluate_nodes = min_train_nodes, min_evaluate_nodes if fraction_evaluate else 0
        self.min_available_nodes, self.weighted_by_key = min_available_nodes, weighted_by_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.train_metrics_aggr_fn, self.evaluate_metrics_aggr_fn = train_metrics_aggr_fn, evaluate_metrics_aggr_fn
        self._flower_arguments()

    def _flower_arguments(self) -> FlowerArguments:
        """Check and return the current values of Flower's arguments. A subclass may have set them after this constructor.

        Raises:
            ValueError: an argument is out of its range, or is not supported.
        """
        now = {one.name: getattr(self, one.name) for one in fields(FlowerArguments)}
        return FlowerArguments(**now | {"min_evaluate_nodes": now["min_evaluate_nodes"] if self.fraction_evaluate else 0})

    def summary(self) -> None:
        """Log what the method does with every normalisation layer."""
        if self._given is None:
            super().summary()
        else:
            self._describe(self._given.model, convert(self._given.model, self._given.method), self._given.method)

    def initialize_parameters(self, client_manager: object) -> None:
        """Refuse Flower's older API, which calls this first: ``start_simulation``, ``start_server``, ``ServerAppComponents``.

        Args:
            client_manager: the client manager of the older API.

        Raises:
            RunFailed: always. The message says what to do.
        """
        raise RunFailed(
            f"{type(self).__name__} works with Flower's message API only, not with start_simulation, start_server or ServerAppComponents: "
            "call strategy.start(grid, ...) in @app.main() of a ServerApp(), and start both apps by flwr run or "
            "fl_bn.flower.run_in_process(...). Or keep your server_fn with Flower's older FedAvg, and make the ServerApp by "
            "legacy_server_app(server_fn, Net, method)"
        )

    def _begun(self, grid: Grid, timeout: float | None, train_config: ConfigRecord) -> tuple[GridTransport, float]:
        """Wait for the clients, and make the transport of the run with them, which every ``start`` makes anew."""
        if self._given is None:
            return super()._begun(grid, timeout, train_config)
        own, given = self._given, self._flower_arguments()
        seconds = TIMEOUT if timeout is None else timeout
        if words := own.method.other_fraction(given.fraction_train):
            log(logging.WARNING, "%s", words)
        wanted, called = Network(convert(own.model, own.method), own.method).signature, called_in(grid)
        population = meet(grid, wanted, own.clients, given.min_available_nodes, seconds, called)
        policy = own.rounds(population.number, given, called, seconds, train_config)
        metrics = OwnMetrics(given.weighted_by_key, given.train_metrics_aggr_fn, given.evaluate_metrics_aggr_fn, own.defence.active)
        transport = GridTransport(
            own.model,
            own.method,
            policy,
            optimizer=own.optimizer,
            defence=own.defence,
            callbacks=own.callbacks,
            own_app=OwnApp(metrics, population, given.configrecord_key),
        )
        return transport, seconds


OWN = frozenset(OwnAppStrategy.__init__.__kwdefaults__ or {})
APPLICATION = frozenset(BatchNormStrategy.__init__.__kwdefaults__ or {})


class OfMethod(OwnAppStrategy):
    """Train by one method, over a Flower app of your own or, with ``rounds``, over fl-bn's own ClientApp.

    Args:
        model: your network, unconverted.
        rounds: the server's settings for rounds, for fl-bn's own ClientApp (``make_client_app``). None: the app is your own.
        options: by name, the method's options (``fl_bn.methods``), and the arguments of ``OwnAppStrategy`` or, with ``rounds``,
            those of ``BatchNormStrategy``. HBN's ``evaluate`` is the method's.
    """

    of: ClassVar[str]

    def __init__(self, model: nn.Module, rounds: Rounds | None = None, **options: Any) -> None:
        of_method = {name for name, _ in options_by_key(METHODS[self.of]).values()}
        own = {name: options.pop(name) for name in [*options] if name in (OWN if rounds is None else APPLICATION) - of_method}
        fraction = own.get("fraction_train", 1.0) if rounds is None else rounds.fraction
        if "fraction" in of_method and fraction != 1.0:  # HBN tracks more slowly with a part of the clients
            options.setdefault("fraction", fraction)
        method = METHODS[self.of](**options)
        if rounds is None:
            super().__init__(model, method, **own)
        else:
            BatchNormStrategy.__init__(self, model, method, rounds, **own)


class FedAvgBN(OfMethod):
    """Run FedAvg, the baseline: the server averages the running means and, separately, the running variances."""

    of = "fedavg"


class FixBN(OfMethod):
    """Run FixBN: the statistics are frozen after round ``freeze_after``."""

    of = "fixbn"


class FedBN(OfMethod):
    """Run FedBN: all BatchNorm tensors stay at their client."""

    of = "fedbn"


class SiloBN(OfMethod):
    """Run SiloBN: running statistics stay at their client, scale and shift are shared."""

    of = "silobn"


class HBN(OfMethod):
    """Run HBN: layers normalise by a learnable mix of batch statistics and pooled global statistics."""

    of = "hbn"


class FBN(OfMethod):
    """Run FBN: clients train with shared running statistics, corrected for the spread of the clients' means."""

    of = "fbn"


class FedTAN(OfMethod):
    """Run FedTAN: the first local step of every round equals a step of centralised training."""

    of = "fedtan"


class FedTAN2(OfMethod):
    """Run FedTAN-II: FedTAN up to round ``freeze_after``, then the statistics are frozen."""

    of = "fedtan2"


@dataclass(frozen=True)
class FlowerArguments:
    """Hold the arguments that Flower's ``FedAvg`` has in all supported versions.

    Attributes:
        fraction_train: the share of the clients that train in a round.
        fraction_evaluate: the share of the clients that evaluate in a round.
        min_train_nodes: the smallest number of clients that train.
        min_evaluate_nodes: the smallest number of clients that evaluate.
        min_available_nodes: the smallest number of clients for the run to start.
        weighted_by_key: the metric by which a client's metrics are weighted.
        arrayrecord_key: the name of Flower's record of arrays. Only ``arrays`` is allowed.
        configrecord_key: the name of the user's config in a message.
        train_metrics_aggr_fn: combines training metrics. None: they are averaged.
        evaluate_metrics_aggr_fn: combines evaluations. None: they are averaged.

    Raises:
        ValueError: an argument is out of its range, or asks for something that fl-bn cannot do.
    """

    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = EXAMPLES
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: Combine | None = None
    evaluate_metrics_aggr_fn: Combine | None = None

    def __post_init__(self) -> None:
        for name in ("fraction_train", "fraction_evaluate"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a share of the clients, a number of at most 1, but got {getattr(self, name)!r}")
        if not 0 < self.fraction_train <= 1:
            raise ValueError(
                f"fraction_train must be in (0, 1], but got {self.fraction_train}: a round in which nobody trains changes nothing (to "
                "only measure statistics: start(..., num_rounds=0))"
            )
        if not 0 <= self.fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate must be 0 (nobody evaluates) .. 1 (all clients do), but got {self.fraction_evaluate}")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            value, least = getattr(self, name), 0 if name == "min_evaluate_nodes" else 1
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, but got {value!r}")
        if self.arrayrecord_key != "arrays":
            raise ValueError(
                f"arrayrecord_key must stay 'arrays', but got {self.arrayrecord_key!r}: fl-bn sends tensors in several records "
                f"({OURS}weights, {OURS}statistics, ...), and training(...) loads them into your network"
            )
        if not isinstance(self.configrecord_key, str) or not self.configrecord_key or self.configrecord_key.startswith(OURS):
            raise ValueError(f"configrecord_key must be a name that does not begin with {OURS!r}, but got {self.configrecord_key!r}")
        if not isinstance(self.weighted_by_key, str) or not self.weighted_by_key:
            raise ValueError(f"weighted_by_key must be the name of a metric, but got {self.weighted_by_key!r}")
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function of (records, weighted_by_key), but got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Given:
    """Hold the arguments of ``OwnAppStrategy`` that are not Flower's, by the same names.

    They are in one object, so that a user's subclass may set attributes such as ``self.model`` without replacing them.

    Raises:
        ValueError: an argument is out of its range, or arguments contradict each other.
        TypeError: an argument is of another type.
    """

    model: nn.Module
    method: Method
    seed: int
    rate: Callable[[int, int], float]
    calibrate: int
    unit_scale: bool
    exchange: ExchangeSettings
    payload: str
    optimizer: ServerOptimizer | None
    defence: Defence
    objective: Objective
    callbacks: tuple[Callback, ...]
    client_weights: str
    clients: int

    def __post_init__(self) -> None:
        check_kinds(self.model, self.method)
        check_name("client_weights", self.client_weights, ("samples", "uniform"))
        for name, kind, such in (
            ("optimizer", ServerOptimizer | None, "fl_bn.federation.optimizers.fedadam()"),
            ("defence", Defence, "fl_bn.federation.defence.Defence(...)"),
            ("objective", Objective, "fl_bn.objectives.FedProx()"),
            ("exchange", ExchangeSettings, "fl_bn.exchange.ExchangeSettings()"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be an object such as {such}, but got {value!r}")
        if type(self.clients) is not int or not 0 <= self.clients <= CLIENTS:
            raise ValueError(
                f"clients must be 1..{CLIENTS}, or 0 to take the value of num-partitions that most nodes report, but got {self.clients!r}"
            )
        check_composition(self.method, self.settings, robust=self.defence.active)
        check_layers(self.model, self.method)
        check_payload(self.payload, self.method)

    @property
    def settings(self) -> LocalTraining:
        """Return settings of local training with the objective. The clients' own loops decide all other settings."""
        return LocalTraining(batch_size=2, epochs=1, objective=self.objective)

    def rounds(self, clients: int, flower: FlowerArguments, called: ClientNames, timeout: float, train_config: Mapping[str, Any]) -> Rounds:
        """Make the policy of the run's rounds.

        Args:
            clients: the number of clients of the run.
            flower: Flower's arguments.
            called: the names of nodes and clients.
            timeout: seconds to wait for the replies of a round.
            train_config: the values for every train message. They may name the learning rate.
        """
        known = len(called.nodes) == clients  # else the app counts its clients in a way of its own
        for name in ("min_train_nodes", "min_evaluate_nodes"):
            if (least := getattr(flower, name)) > max(clients, 2):
                log(logging.WARNING, "%s is %d, but there are %d clients: all of them take part in every round", name, least, clients)
        rate = self.rate
        if rate is constant_rate:
            rate = NamedRates()
            rate.note(1, train_config)
        return Rounds(
            clients,
            flower.fraction_train,
            timeout=timeout,
            at_start=min(flower.min_available_nodes, clients),
            min_cohort=min(flower.min_train_nodes, clients),
            at_clients=True,
            evaluate_share=flower.fraction_evaluate,
            evaluate_least=flower.min_evaluate_nodes,
            client_weights=self.client_weights,
            seed=self.seed,
            rate=rate,
            calibrate=self.calibrate,
            unit_scale=self.unit_scale,
            auxiliary=auxiliary(self.settings),
            objective=self.objective.described,
            exchange=self.exchange,
            payload=self.payload,
            nodes=called.nodes if known else (),
            names=called.names if known else (),
            registered=called.registered,
        )
