"""Run the ``server_fn`` of Flower's older API with an fl-bn method.

In server_app.py, ``app = ServerApp(server_fn=server_fn)`` becomes::

    app = legacy_server_app(server_fn, Net, fixbn())
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fl_bn.flower.grid_transport import RunResult
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.log import log
from fl_bn.flower.own.legacy_client import SCALARS
from fl_bn.flower.own.metrics import EXAMPLES, is_number
from fl_bn.flower.population import Client
from fl_bn.flower.strategies import TIMEOUT, OwnAppStrategy
from fl_bn.flower.wire.gate import OWN_METRICS
from fl_bn.methods import Method

ServerFn = Callable[[Context], ServerAppComponents]
AGGREGATES = ("aggregate_fit", "aggregate_evaluate")  # hooks of Flower's older FedAvg that a user's class may override
NOT_CALLED = (
    "configure_fit",
    "configure_evaluate",
    "num_fit_clients",
    "num_evaluation_clients",
)  # hooks that such a class must not override, as nobody calls them
SERVER_METHODS = ("fit_round", "evaluate_round", "set_strategy", "client_manager", "_get_initial_parameters")
GIVEN = {  # argument of OwnAppStrategy -> the attribute of the older FedAvg that gives its value
    "fraction_train": "fraction_fit",
    "fraction_evaluate": "fraction_evaluate",
    "min_train_nodes": "min_fit_clients",
    "min_evaluate_nodes": "min_evaluate_clients",
    "min_available_nodes": "min_available_clients",
}

IN_STRATEGY = GIVEN | {
    "train_metrics_aggr_fn": "fit_metrics_aggregation_fn",
    "evaluate_metrics_aggr_fn": "evaluate_metrics_aggregation_fn",
}
UNKNOWN_THERE = {
    "configrecord_key": "its clients would not get their config",
    "weighted_by_key": "the weights are the numbers of samples that fit and evaluate return",
}


def legacy_server_app(server_fn: ServerFn, model: Callable[[], nn.Module], method: Method, **options: Any) -> ServerApp:
    """Return a ServerApp that runs the strategy of a legacy ``server_fn`` in rounds of ``method``.

    ``server_fn`` needs no change. Its strategy is Flower's older ``FedAvg``, or a class derived from it. Its
    fractions, numbers of clients, ``initial_parameters``, ``on_fit_config_fn``, ``on_evaluate_config_fn``,
    ``evaluate_fn`` and metric functions are all used. A class of the user's own may override ``evaluate``,
    ``aggregate_fit`` and ``aggregate_evaluate``. In the last two, ``super()`` returns what fl-bn computed from the
    replies. A ``Server`` of the user's own may override ``fit``: ``super().fit(...)`` runs the rounds, and returns
    Flower's ``History``, which ``run_in_process`` returns in turn.

    Args:
        server_fn: returns Flower's ``ServerAppComponents``.
        model: makes the network, unconverted.
        method: the method, the same as the clients'.
        options: further keyword arguments of ``OwnAppStrategy``, such as ``callbacks`` or ``seed``.

    Returns:
        The app for server_app.py.

    Raises:
        ValueError: one of ``options`` is a setting of the strategy of ``server_fn``.
    """
    for name in options:
        if name in IN_STRATEGY:
            raise ValueError(f"{name} is given by the strategy of server_fn: set it there, as {IN_STRATEGY[name]}")
        if name in UNKNOWN_THERE:
            raise ValueError(f"Flower's older API has no {name}, so {UNKNOWN_THERE[name]}: leave it out")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        components = server_fn(context)
        config = components.config or ServerConfig()
        manager = components.client_manager or SimpleClientManager()
        server = components.server or Server(client_manager=manager, strategy=components.strategy)
        rounds = LegacyRounds(checked_strategy(server.strategy, method), model(), method, **options)

        def fit(num_rounds: int, timeout: float | None) -> tuple[History, float]:
            begin = time.monotonic()
            result = rounds.fit(grid, rounds.initial(manager), num_rounds, TIMEOUT if timeout is None else timeout)
            server.parameters = rounds.history.parameters = ndarrays_to_parameters(rounds.whole(result.arrays or ArrayRecord()))
            return rounds.history, time.monotonic() - begin

        history, seconds = with_fit(server, fit).fit(num_rounds=config.num_rounds, timeout=config.round_timeout)
        log(logging.INFO, "[SUMMARY] %s rounds in %.2f s", config.num_rounds, seconds)
        for line in io.StringIO(str(history)):
            log(logging.INFO, "\t%s", line.strip("\n"))
        if isinstance(grid, InProcessGrid):
            grid.result = history

    return app


def checked_strategy(strategy: Any, method: Method) -> FedAvg:
    """Check that fl-bn's rounds can follow all settings and hooks of a strategy of Flower's older API, and return it.

    Args:
        strategy: the strategy that ``server_fn`` gives.
        method: the method of the rounds.

    Raises:
        TypeError: the strategy is not derived from ``FedAvg``.
        ValueError: it overrides a hook that fl-bn's rounds do not call, or sets an option that they cannot follow.
    """
    if not isinstance(strategy, FedAvg):
        raise TypeError(f"expected a strategy derived from flwr.server.strategy.FedAvg, but server_fn gives a {type(strategy).__name__}")
    kind = type(strategy)
    flowers = next(one for one in kind.__mro__ if package(one) == package(FedAvg))
    if flowers is not FedAvg:
        raise ValueError(
            f"{kind.__name__} is Flower's {flowers.__name__}, but fl-bn's rounds average by the method: take FedAvg, and the options "
            "optimizer=... or defence=... of legacy_server_app, or an objective in the clients' loop (docs/how-to/objectives.md)"
        )
    if changed := overridden(kind, NOT_CALLED):
        raise ValueError(
            f"{kind.__name__} overrides {changed[0]}, which fl-bn's rounds do not call: give values for the clients by on_fit_config_fn. "
            "Or derive from a strategy of fl_bn.flower, whose hooks are called (docs/start/flower-app.md)"
        )
    if "aggregate_fit" in overridden(kind, AGGREGATES) and method.personal:
        raise ValueError(
            f"{kind.__name__} overrides aggregate_fit, but under {method.name} the clients keep tensors, so there are no arrays of the "
            "whole network to return: move its code to evaluate_fn, and let the clients send these tensors by legacy_client_app(..., "
            "tells=True)"
        )
    if not strategy.accept_failures:
        raise ValueError(
            "accept_failures=False has no meaning here: a client that fails is left out of the round, and the log names it. Leave this "
            "option out"
        )
    return strategy


def package(kind: type) -> str:
    """Return the top package of the module that defines a class.

    Args:
        kind: the class.
    """
    return kind.__module__.partition(".")[0]


def overridden(kind: type, names: Iterable[str]) -> list[str]:
    """Return the methods among ``names`` that the class ``kind`` overrides.

    Args:
        kind: a class derived from Flower's older ``FedAvg``.
        names: names of methods of that ``FedAvg``.
    """
    return [name for name in names if getattr(kind, name) is not getattr(FedAvg, name)]


@dataclass(frozen=True)
class Told:
    """Hold one client's results of a round, for an ``aggregate_fit`` or ``aggregate_evaluate`` of the user's own.

    These hooks get this object in place of Flower's ``FitRes`` or ``EvaluateRes``.

    Attributes:
        num_examples: the client's number of samples.
        metrics: the client's own metrics.
        loss: the client's loss in an evaluation.
    """

    num_examples: int
    metrics: dict[str, Any]
    loss: float = 0.0

    @property
    def parameters(self) -> Any:
        """Raise AttributeError: fl-bn has no list of a client's arrays."""
        raise AttributeError("fl-bn has no list of one client's arrays: a reply holds only the tensors that the method shares, by name")


@dataclass(frozen=True)
class Named:
    """Hold a client's number, in place of Flower's ``ClientProxy``, for hooks of the user's own.

    Attributes:
        cid: the client's number, as text.
    """

    cid: str


def with_aggregates(strategy: FedAvg, found: dict[str, Any]) -> FedAvg:
    """Make the aggregating hooks of the older strategy return fl-bn's results, in place of the averages of Flower's ``FedAvg``.

    In a hook that the user's class overrides, ``super()`` returns these results.

    Args:
        strategy: the strategy that ``server_fn`` gives.
        found: hook -> the result to return. The rounds set it.
    """

    class Aggregates(FedAvg):
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            return found["aggregate_fit"]

        def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
            return found["aggregate_evaluate"]

    kind = type(strategy)
    strategy.__class__ = Aggregates if kind is FedAvg else type(kind.__name__, (kind, Aggregates), {})
    return strategy


def with_fit(server: Server, fit: Callable[[int, float | None], tuple[History, float]]) -> Server:
    """Make ``server`` run ``fit`` in place of Flower's ``Server.fit``.

    In a class of the user's own that overrides ``fit``, a call of ``super().fit`` runs the argument ``fit``.

    Args:
        server: the server that ``server_fn`` gives.
        fit: runs the rounds.

    Raises:
        ValueError: the user's class overrides another method than ``fit``.
    """
    kind = type(server)
    if changed := [name for name in SERVER_METHODS if getattr(kind, name) is not getattr(Server, name)]:
        raise ValueError(
            f"{kind.__name__} overrides {changed[0]}, which fl-bn's rounds do not call: move its code to fit, around super().fit(...)"
        )

    class Fits(Server):
        def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
            return fit(num_rounds, timeout)

    server.__class__ = Fits if kind is Server else type(kind.__name__, (kind, Fits), {})
    return server


class RunHistory(History):
    """Hold Flower's ``History`` of a run, and the arrays with which it ended.

    Attributes:
        parameters: all arrays of the network, in the order of its state_dict. For tensors that clients keep, these are the
            initial values of the server's network.
    """

    parameters: Parameters


class LegacyRounds(OwnAppStrategy):
    """Run fl-bn's rounds with an older strategy's configs, evaluation and metric functions, and write Flower's ``History``.

    Args:
        older: the strategy of ``server_fn``.
        model: the network, unconverted.
        method: the method.
        options: further arguments of ``OwnAppStrategy``.
    """

    _needed_metrics = ("loss",)  # metrics of other names go to the older strategy's function, as each client sent them

    def __init__(self, older: FedAvg, model: nn.Module, method: Method, **options: Any) -> None:
        super().__init__(model, method, **{name: getattr(older, attribute) for name, attribute in GIVEN.items()}, **options)
        self._found: dict[str, Any] = {}
        self.older, self.history = with_aggregates(older, self._found), RunHistory()

    def initial(self, manager: Any) -> ArrayRecord | None:
        """Return the arrays of the strategy's ``initial_parameters`` by name; None if it has none.

        Args:
            manager: Flower's client manager.

        Raises:
            ValueError: the number of arrays is not the number of tensors in the network's state_dict.
        """
        if (parameters := self.older.initialize_parameters(manager)) is None:
            log(logging.INFO, "the strategy has no initial_parameters: the run starts from the server's network, not from a client's")
            return None
        return self.named("initial_parameters", parameters)

    def named(self, what: str, parameters: Parameters) -> ArrayRecord:
        """Return the older API's list of arrays as a record, by the names of the network's state_dict.

        Args:
            what: where the arrays come from, for the error message.
            parameters: the arrays in the order of the network's state_dict.

        Raises:
            ValueError: the number of arrays is not the number of tensors in the state_dict. Shapes are not checked here.
        """
        arrays, state = parameters_to_ndarrays(parameters), self._given.model.state_dict()
        if len(arrays) != len(state):
            raise ValueError(
                f"{what} has {len(arrays)} arrays, but the network has {len(state)} tensors: give all of its state_dict. The method "
                "decides which tensors stay with the clients"
            )
        return ArrayRecord({name: torch.from_numpy(np.array(array)) for name, array in zip(state, arrays, strict=True)})

    def whole(self, arrays: ArrayRecord) -> list[np.ndarray]:
        """Return the arrays as a list in the order of the network's state_dict.

        Tensors that clients keep are not shared. For these, the list has the initial values of the server's network.

        Args:
            arrays: the shared arrays, by name.
        """
        given = arrays.to_torch_state_dict()
        return [given.get(name, tensor).detach().cpu().numpy() for name, tensor in self._given.model.state_dict().items()]

    def fit(self, grid: Grid, initial_arrays: ArrayRecord | None, num_rounds: int, timeout: float) -> RunResult:
        """Run the rounds. If the strategy evaluates at the server, call its evaluation from round 0 on.

        Args:
            grid: Flower's grid.
            initial_arrays: the tensors to start from. None: the network's own.
            num_rounds: the number of rounds.
            timeout: how many seconds to wait for the replies of a round.

        Returns:
            The result of ``start``.
        """
        evaluates = self.older.evaluate_fn is not None or bool(overridden(type(self.older), ["evaluate"]))
        return self.start(grid, initial_arrays, num_rounds, timeout, evaluate_fn=self._at_server if evaluates else None)

    def _at_server(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if (found := self.older.evaluate(server_round, ndarrays_to_parameters(self.whole(arrays)))) is None:
            return None
        loss, metrics = found
        self.history.add_loss_centralized(server_round, loss)
        self.history.add_metrics_centralized(server_round, dict(metrics))
        return MetricRecord({"loss": float(loss), **{name: float(v) for name, v in metrics.items() if isinstance(v, int | float)}})

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make the train messages, with the config that ``on_fit_config_fn`` returns for this round."""
        return super().configure_train(server_round, arrays, _said(self.older.on_fit_config_fn, server_round, config), grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make the evaluate messages, with the config that ``on_evaluate_config_fn`` returns for this round."""
        return super().configure_evaluate(server_round, arrays, _said(self.older.on_evaluate_config_fn, server_round, config), grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies, and call the older strategy's ``aggregate_fit``, which may replace the combined arrays.

        ``fit_metrics_aggregation_fn`` combines the metrics that the clients' ``fit`` returned.

        Returns:
            The shared tensors, and the metrics; ``(None, None)`` if too few replies are usable, or if ``aggregate_fit``
            returns no arrays.
        """
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        told = _told(replies, self.transport.cohort, {client.client for client in self.transport.record.accepted})
        if arrays is None or not told:
            return arrays, metrics
        given, means = ndarrays_to_parameters(self.whole(arrays)), _means(self.older.fit_metrics_aggregation_fn, told)
        self._found["aggregate_fit"] = given, means
        parameters, own = self.older.aggregate_fit(server_round, told, [])  # type: ignore[arg-type]
        if own:
            self.history.add_metrics_distributed_fit(server_round, own)
        if parameters is None:
            return None, None
        return (arrays if parameters is given else self.named("what aggregate_fit returned", parameters)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the clients' losses, call the older strategy's ``aggregate_evaluate``, and store its results in the history.

        ``evaluate_metrics_aggregation_fn`` combines the metrics that the clients' ``evaluate`` returned.

        Returns:
            The combined metrics, without the results of the older strategy; None if there are none.
        """
        replies = list(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is None:
            return None
        told = _told(replies, self.transport.evaluating, self.transport.record.client_evaluation)
        if not told:
            return metrics
        loss: Any = metrics["loss"]
        self._found["aggregate_evaluate"] = float(loss), _means(self.older.evaluate_metrics_aggregation_fn, told)
        own_loss, own = self.older.aggregate_evaluate(server_round, told, [])  # type: ignore[arg-type]
        if own_loss is not None:
            self.history.add_loss_distributed(server_round, own_loss)
        if own:
            self.history.add_metrics_distributed(server_round, own)
        return metrics


def _said(config_fn: Callable[[int], dict[str, Any]] | None, server_round: int, config: ConfigRecord) -> ConfigRecord:
    """Replace the content of ``config`` by the values that ``config_fn`` returns for the round, and return ``config``."""
    for name in [*config]:
        del config[name]
    config.update({} if config_fn is None else config_fn(server_round))
    return config


def _means(combine: Callable[[list[tuple[int, dict[str, Any]]]], dict[str, Any]] | None, told: list[tuple[Named, Told]]) -> dict[str, Any]:
    return {} if combine is None else combine([(one.num_examples, one.metrics) for _, one in told])


def _told(replies: Sequence[Message], clients: Sequence[Client], counted: Container[int]) -> list[tuple[Named, Told]]:
    """Return the results of the clients in ``counted``, in client order, with the metrics that they sent.

    A client that sends no number of samples in the record ``metrics`` is left out, and the log names it.
    """
    index_of, given = {client.node: client.index for client in clients}, dict[int, Told]()
    for reply in replies:
        index = index_of.get(reply.metadata.src_node_id, -1)
        if index in counted and index not in given and reply.has_content():
            own: Any = reply.content.metric_records.get(OWN_METRICS, {})
            if not is_number(samples := own.get(EXAMPLES)) or samples < 0:
                log(logging.WARNING, "client %s's results are left out: its reply has no %s in the record %s", index, EXAMPLES, OWN_METRICS)
                continue
            loss = float(own["loss"]) if is_number(own.get("loss")) else math.nan
            given[index] = Told(samples, dict(reply.content.config_records.get(SCALARS, {})), loss)
    return [(Named(str(index)), given[index]) for index in sorted(given)]
