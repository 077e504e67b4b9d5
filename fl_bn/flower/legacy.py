"""Adapt apps of Flower's older API, a ``NumPyClient`` and a ``server_fn``, to fl-bn's rounds."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fl_bn.flower.compat import log
from fl_bn.flower.own_app import answers, evaluating, numbers, replayed, training
from fl_bn.flower.own_metrics import EXAMPLES, is_number
from fl_bn.flower.population import Client
from fl_bn.flower.strategies import OwnAppStrategy
from fl_bn.flower.wire.gate import OWN_METRICS
from fl_bn.methods import Method
from fl_bn.task import CLASSIFICATION, Task

SCALARS = "scalars"
"""The record with all metrics of a legacy client, also text, which a MetricRecord cannot hold."""
GIVEN = {  # argument of OwnAppStrategy -> the attribute of the older FedAvg that gives its value
    "fraction_train": "fraction_fit",
    "fraction_evaluate": "fraction_evaluate",
    "min_train_nodes": "min_fit_clients",
    "min_evaluate_nodes": "min_evaluate_clients",
    "min_available_nodes": "min_available_clients",
}
CALLED = {"initialize_parameters", "evaluate", "aggregate_fit", "aggregate_evaluate"}  # methods of a strategy that the rounds call

ClientOf = Callable[[Context], Any]


# The client


def legacy_client_app(
    client_fn: Callable[[Any], Any],
    method: Method,
    *,
    net: str = "net",
    trainloader: str = "trainloader",
    task: Task = CLASSIFICATION,
    tells: bool = False,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return the ClientApp of a legacy ``client_fn``, whose clients train and evaluate by ``method``.

    In client_app.py, ``app = ClientApp(client_fn)`` becomes ``app =
    legacy_client_app(client_fn, fixbn())``. The clients' class needs no change. In
    every round, ``fit`` gets a new network's arrays, and the arrays that it returns
    are used. So make in ``fit`` and ``evaluate`` whatever holds the network, such
    as the optimizer.

    Args:
        client_fn: makes a ``NumPyClient``, with or without ``.to_client()``, from
            Flower's context or, in the oldest form, ``client_fn(cid: str)``, from
            the client's number.
        method: the method, the same as the server's.
        net: the client's attribute that holds its network, such as ``"model"`` or
            ``"trainer.model"``.
        trainloader: the client's attribute that holds its training batches.
        task: splits a batch into inputs and targets, if the method measures the
            batches.
        tells: whether the client sends the BatchNorm layers that it keeps, as in
            ``answer``.
        mods: Flower's mods for the app.
    """
    app = ClientApp(mods=[*mods])

    (first, *_) = inspect.signature(client_fn).parameters.values()
    oldest = first.name == "cid" or first.annotation in (str, "str")

    def client_of(context: Context) -> Any:
        made = client_fn(str(context.node_config["partition-id"]) if oldest else context)
        return getattr(made, "numpy_client", made)

    app.train(mods=[replayed])(partial(_fit, client_of, net, trainloader, method, task))
    app.evaluate()(partial(_evaluate, client_of, net, method))
    answers(app, lambda c: part(client_of(c), net), method, lambda c: part(client_of(c), trainloader), task=task, tells=tells)
    return app


def part(client: Any, name: str) -> Any:
    """Return the client's network or batches. ``ValueError``: it has no such attribute."""
    if (found := reduce(lambda at, one: getattr(at, one, None), name.split("."), client)) is None:
        raise ValueError(f"the client has no attribute {name!r}: name it, legacy_client_app(..., net='model', trainloader='loader')")
    return found


def put(client: Any, name: str, model: nn.Module) -> None:
    """Replace the client's network."""
    *outer, last = name.split(".")
    setattr(reduce(getattr, outer, client), last, model)


def _named(model: nn.Module, arrays: Sequence[Any], whose: str) -> dict[str, Any]:
    """Return arrays by the names in the network's ``state_dict``. ``ValueError``: there are more or fewer arrays."""
    names = list(model.state_dict())
    if len(arrays) != len(names):
        raise ValueError(f"expected {len(names)} arrays, one for each entry of the network's state_dict, but {whose} has {len(arrays)}")
    return dict(zip(names, arrays, strict=True))


def _fit(client_of: ClientOf, net: str, trainloader: str, method: Method, task: Task, message: Message, context: Context) -> Message:
    """Answer a train message."""
    client = client_of(context)
    with training(message, context, part(client, net), method, part(client, trainloader), task=task) as round:
        put(client, net, round.model)
        arrays, samples, metrics = client.fit(_arrays(round.model), dict(message.content.config_records.get("config", {})))
        # the arrays count, since the user's code may have clipped them or added noise
        round.model.load_state_dict({name: torch.as_tensor(a) for name, a in _named(round.model, arrays, "what fit returned").items()})
    own = _numbers(metrics)
    reply = round.message(samples, own.get("loss", own.get("train_loss")), own)
    reply.content[SCALARS] = numbers(metrics, ConfigRecord)
    return reply


def _evaluate(client_of: ClientOf, net: str, method: Method, message: Message, context: Context) -> Message:
    client = client_of(context)
    model = evaluating(message, context, part(client, net), method)
    put(client, net, model)
    loss, samples, metrics = client.evaluate(_arrays(model), dict(message.content.config_records.get("config", {})))
    own = numbers({**_numbers(metrics), "loss": loss, EXAMPLES: samples})
    return Message(RecordDict({OWN_METRICS: own, SCALARS: numbers(metrics, ConfigRecord)}), reply_to=message)


def _arrays(model: nn.Module) -> list[np.ndarray]:
    """Return copies of the network's arrays, which training ``model`` does not change."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in numbers(metrics, ConfigRecord).items() if type(value) in (int, float)}


# The server


def legacy_server_app(
    server_fn: Callable[[Context], ServerAppComponents], model: Callable[[], nn.Module], method: Method, **options: Any
) -> ServerApp:
    """Return a ServerApp that runs the strategy of a legacy ``server_fn`` in rounds of ``method``.

    In server_app.py, ``app = ServerApp(server_fn=server_fn)`` becomes ``app =
    legacy_server_app(server_fn, Net, fixbn())``. The strategy is Flower's older
    ``FedAvg``, or a class derived from it. Its fractions, numbers of clients,
    ``initial_parameters``, ``on_fit_config_fn``, ``on_evaluate_config_fn``,
    ``evaluate_fn`` and metric functions are used. Your class may override
    ``evaluate``, ``aggregate_fit`` and ``aggregate_evaluate``. In the last two,
    ``super()`` returns what fl-bn computed from the replies. Your ``Server`` may
    override ``fit``: ``super().fit(...)`` runs the rounds, and returns Flower's
    ``History``, with all final arrays of the network as ``parameters``, which
    ``run_in_process`` returns, too.

    Args:
        server_fn: returns Flower's ``ServerAppComponents``.
        model: makes the network, unconverted.
        method: the method, the same as the clients'.
        options: arguments of ``OwnAppStrategy`` that the older ``FedAvg`` does not
            have, such as ``callbacks``.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Context) -> None:
        components = server_fn(context)
        config = components.config or ServerConfig()
        manager = components.client_manager or SimpleClientManager()
        server = components.server or Server(client_manager=manager, strategy=components.strategy)
        check_class(server, Server, {"fit"})
        older: Any = server.strategy
        check_class(older, FedAvg, CALLED - ({"aggregate_fit"} if method.personal else set()))  # clients keep tensors
        given = [(thing, type(thing)) for thing in (server, older)]
        rounds = LegacyRounds(older, model(), method, **options)

        def fit(self: Server, num_rounds: int, timeout: float | None) -> tuple[History, float]:
            begin = time.monotonic()
            at_server = rounds.at_server if older.evaluate_fn is not None or type(older).evaluate is not FedAvg.evaluate else None
            result = rounds.start(grid, rounds.initial(manager), num_rounds, timeout, evaluate_fn=at_server)
            server.parameters = rounds.history.parameters = ndarrays_to_parameters(rounds.whole(result.arrays or ArrayRecord()))
            return rounds.history, time.monotonic() - begin

        put_between(server, Server, fit=fit)
        try:
            history, seconds = server.fit(num_rounds=config.num_rounds, timeout=config.round_timeout)
        finally:
            for thing, kind in given:  # for a second run with the same objects
                thing.__class__ = kind
        log(logging.INFO, "[SUMMARY] %s rounds in %.2f s\n%s", config.num_rounds, seconds, history)  # as Flower's own server does
        grid.result = history  # what run_in_process returns

    return app


def check_class(thing: object, base: type, called: Collection[str]) -> None:
    """Raise ``ValueError`` if ``thing`` is not of ``base``, or overrides what is not called."""
    kind = type(thing)
    own = kind.__mro__[: kind.__mro__.index(base)] if isinstance(thing, base) else (kind,)
    named = {name for one in own for name in vars(one) if not name.startswith("_") and hasattr(base, name)} - {*called}
    if theirs := [*named, *(one.__name__ for one in own if one.__module__.partition(".")[0] == "flwr" or not isinstance(thing, base))]:
        wanted = f"expected Flower's {base.__name__}, or a class derived from it that overrides {', '.join(sorted(called))} alone"
        raise ValueError(f"{kind.__name__}: {wanted}, but fl-bn's rounds do not call {theirs[0]}: see docs/start/flower-app.md")


def put_between(thing: Any, base: type, **methods: Callable[..., Any]) -> None:
    """Put ``methods`` between the class of ``thing`` and Flower's ``base``, for ``super()``."""
    between, kind = type(base.__name__, (base,), methods), type(thing)
    thing.__class__ = between if kind is base else type(kind.__name__, (kind, between), {})


class LegacyRounds(OwnAppStrategy):
    """Run fl-bn's rounds with an older strategy's functions, and write Flower's ``History``."""

    def __init__(self, older: FedAvg, model: nn.Module, method: Method, **options: Any) -> None:
        given = {name: getattr(older, attribute) for name, attribute in GIVEN.items()}
        super().__init__(model, method, **given, **options)
        self.older, self._model = older, model
        self.history: Any = History()  # with ``parameters`` at the end
        self._found: tuple[Any, Any] = None, {}  # what the older strategy's next aggregating hook returns
        put_between(older, FedAvg, **dict.fromkeys(("aggregate_fit", "aggregate_evaluate"), lambda *_: self._found))

    def initial(self, manager: Any) -> ArrayRecord | None:
        """Return the strategy's ``initial_parameters`` by name, if it has any."""
        given = getattr(self.older, "initial_parameters", None)
        parameters = self.older.initialize_parameters(manager)
        self.older.initial_parameters = given  # FedAvg forgets them
        return None if parameters is None else self._named(parameters)

    def _named(self, parameters: Parameters) -> ArrayRecord:
        arrays = _named(self._model, parameters_to_ndarrays(parameters), "initial_parameters")
        return ArrayRecord({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})

    def whole(self, arrays: ArrayRecord) -> list[np.ndarray]:
        """Return the arrays in state_dict order. Tensors kept at clients are initial ones."""
        given = arrays.to_torch_state_dict()
        return [given.get(name, tensor).detach().cpu().numpy() for name, tensor in self._model.state_dict().items()]

    def at_server(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate by the older strategy, as ``evaluate_fn``."""
        if (found := self.older.evaluate(server_round, ndarrays_to_parameters(self.whole(arrays)))) is None:
            return None
        loss, metrics = found
        self.history.add_loss_centralized(server_round, loss)
        self.history.add_metrics_centralized(server_round, dict(metrics))
        return MetricRecord({**_numbers(metrics), "loss": float(loss)})

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make the train messages, with the config that ``on_fit_config_fn`` returns."""
        return super().configure_train(server_round, arrays, self._config("fit", server_round, config), grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make the evaluate messages, with the config of ``on_evaluate_config_fn``."""
        return super().configure_evaluate(server_round, arrays, self._config("evaluate", server_round, config), grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies, and call ``aggregate_fit``, which may replace the arrays.

        ``fit_metrics_aggregation_fn`` combines the metrics. The round fails if
        ``aggregate_fit`` returns no arrays.
        """
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        told = _told(replies, self.transport.cohort, {client.client for client in self.transport.record.accepted})
        if arrays is None or not told:
            return arrays, metrics
        given = ndarrays_to_parameters(self.whole(arrays))
        parameters, own = self._asked_hook("fit", given, server_round, told, self.transport.cohort)
        if own:
            self.history.add_metrics_distributed_fit(server_round, own)
        if parameters is None:
            return None, None
        return (arrays if parameters is given else self._named(parameters)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the clients' losses, and store the results of ``aggregate_evaluate``."""
        replies = list(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        told = _told(replies, self.transport.evaluations.clients, self.transport.record.client_evaluation) if metrics is not None else []
        if metrics is None or not told:
            return metrics
        loss, own = self._asked_hook("evaluate", metrics.get("loss", math.nan), server_round, told, self.transport.evaluations.clients)
        if loss is not None:
            self.history.add_loss_distributed(server_round, loss)
        if own:
            self.history.add_metrics_distributed(server_round, own)
        return metrics

    def _config(self, name: str, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return ``config``, replaced by what the older strategy's function gives."""
        config.clear()
        config.update({} if (config_fn := getattr(self.older, f"on_{name}_config_fn")) is None else config_fn(server_round))
        return config

    def _asked_hook(self, name: str, found: Any, server_round: int, told: list[Any], asked: Sequence[Client]) -> Any:
        combine, counted = getattr(self.older, f"{name}_metrics_aggregation_fn"), {one.cid for one, _ in told}
        failures = [RuntimeError(f"client {one.index}: reply not used") for one in asked if str(one.index) not in counted]
        self._found = found, {} if combine is None else combine([(one.num_examples, one.metrics) for _, one in told])
        self._found = (None, {}) if failures and not self.older.accept_failures else self._found
        return getattr(self.older, f"aggregate_{name}")(server_round, told, failures)


def _told(replies: Sequence[Message], clients: Sequence[Client], counted: Collection[int]) -> list[Any]:
    """Return pairs of client and results for the clients in ``counted``, as Flower's hooks get them.

    A reply holds only the tensors that the method shares, so results have no
    arrays. A client that sends no number of samples is left out.
    """
    index_of, told = {client.node: client.index for client in clients}, dict[int, Any]()
    for reply in replies:
        index = index_of.get(reply.metadata.src_node_id, -1)
        if index in counted and index not in told and reply.has_content():
            own: Any = reply.content.metric_records.get(OWN_METRICS, {})
            if is_number(samples := own.get(EXAMPLES)) and samples >= 0:
                loss = float(own["loss"]) if is_number(own.get("loss")) else math.nan
                metrics = dict(reply.content.config_records.get(SCALARS, {}))
                told[index] = SimpleNamespace(num_examples=samples, metrics=metrics, loss=loss)
    return [(SimpleNamespace(cid=str(index)), told[index]) for index in sorted(told)]
