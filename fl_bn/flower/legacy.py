"""Run apps of Flower's older API, a ``NumPyClient`` and a ``server_fn``, as an adapter over ``training`` and ``OwnAppStrategy.start``.

In client_app.py, ``app = ClientApp(client_fn)`` becomes ``app = legacy_client_app(client_fn, fixbn())``. In server_app.py,
``app = ServerApp(server_fn=server_fn)`` becomes ``app = legacy_server_app(server_fn, Net, fixbn())``.
"""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid, ServerApp
from torch import nn
from torch.optim import Optimizer

from fl_bn.flower.compat import log
from fl_bn.flower.hooks import EXAMPLES, is_number
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.own_app import answers, evaluating, replayed, training
from fl_bn.flower.population import Client
from fl_bn.flower.strategies import OwnAppStrategy
from fl_bn.flower.wire.gate import OWN_METRICS
from fl_bn.methods import Method
from fl_bn.task import CLASSIFICATION, Task

SCALARS = "scalars"
"""The record with all metrics that a legacy client returned. It may hold text, too, which a MetricRecord cannot."""
LOSSES = ("loss", "train_loss")
GIVEN = {  # argument of OwnAppStrategy -> the attribute of the older FedAvg that gives its value
    "fraction_train": "fraction_fit",
    "fraction_evaluate": "fraction_evaluate",
    "min_train_nodes": "min_fit_clients",
    "min_evaluate_nodes": "min_evaluate_clients",
    "min_available_nodes": "min_available_clients",
}
NOT_OPTIONS = {name: f"is given by the strategy of server_fn: set it there, as {attribute}" for name, attribute in GIVEN.items()} | {
    "train_metrics_aggr_fn": "is given by the strategy of server_fn: set it there, as fit_metrics_aggregation_fn",
    "evaluate_metrics_aggr_fn": "is given by the strategy of server_fn: set it there, as evaluate_metrics_aggregation_fn",
    "configrecord_key": "is not in Flower's older API, whose clients would not get their config: leave it out",
    "weighted_by_key": "is not in Flower's older API, whose weights are the samples that fit and evaluate return: leave it out",
}
NOT_CALLED = {  # methods of a user's class that fl-bn's rounds do not call
    FedAvg: ("configure_fit", "configure_evaluate", "num_fit_clients", "num_evaluation_clients"),
    Server: ("fit_round", "evaluate_round", "set_strategy", "client_manager", "_get_initial_parameters"),
}
ClientFn = Callable[[Context], Any]
ServerFn = Callable[[Context], ServerAppComponents]


# The client


def legacy_client_app(
    client_fn: ClientFn,
    method: Method,
    *,
    net: str = "net",
    trainloader: str = "trainloader",
    task: Task = CLASSIFICATION,
    tells: bool = False,
    mods: Sequence[Any] = (),
) -> ClientApp:
    """Return the ClientApp of a legacy ``client_fn``, whose clients train and evaluate by ``method``.

    The clients' class needs no change. In every round, the client's network is replaced by the network of the
    round. ``fit`` gets the arrays of this network, and the arrays that ``fit`` returns are used.

    Args:
        client_fn: makes a ``NumPyClient`` from Flower's context, with or without ``.to_client()``.
        method: the method, the same as the server's.
        net: the name of the client's attribute that holds its network.
        trainloader: the name of the client's attribute that holds its training batches.
        task: splits a batch into inputs and targets, if the method measures the batches.
        tells: whether the client sends the BatchNorm layers that it keeps, as in ``answer``.
        mods: Flower's mods for the app.

    Returns:
        The app for client_app.py.
    """
    app = ClientApp(mods=[*mods])

    def client_of(context: Context) -> Any:
        return checked_client(client_fn(context), net, trainloader)

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        return _fit(message, context, client_of(context), net, trainloader, method, task)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(message, context, client_of(context), net, method)

    answers(app, lambda c: getattr(client_of(c), net), method, lambda c: getattr(client_of(c), trainloader), task=task, tells=tells)
    return app


def checked_client(made: Any, net: str, trainloader: str) -> Any:
    """Return the ``NumPyClient`` that a ``client_fn`` made, if fl-bn can run it.

    Raises:
        TypeError: ``made`` is no ``NumPyClient``.
        ValueError: an attribute is missing, or the client made its optimizer in its constructor. Each round replaces the
            network, so such an optimizer would update a network that is no longer used.
    """
    client = getattr(made, "numpy_client", made)
    if not isinstance(client, NumPyClient):
        raise TypeError(
            f"client_fn must return a NumPyClient, or its to_client(), but returned a {type(made).__name__}: for another kind of client "
            "write handlers with fl_bn.flower.training (docs/start/flower-app.md)"
        )
    kind, own = type(client).__name__, getattr(client, "__dict__", {})
    if not isinstance(getattr(client, net, None), nn.Module):
        found = [name for name, value in own.items() if isinstance(value, nn.Module)]
        raise ValueError(
            f"{kind} has no network in its attribute {net!r} (networks are in: {', '.join(found) or 'none'}): "
            f"call legacy_client_app(client_fn, method, net={found[0] if found else 'NAME'!r})"
        )
    if not hasattr(client, trainloader):
        raise ValueError(
            f"{kind} has no attribute {trainloader!r} (it has: {', '.join(own)}): name the one with the training batches, "
            "legacy_client_app(client_fn, method, trainloader='NAME')"
        )
    if held := [name for name, value in own.items() if isinstance(value, Optimizer)]:
        raise ValueError(
            f"{kind} makes its optimizer {held[0]!r} in its constructor, but each round puts another network into {net!r}: "
            "make the optimizer in fit"
        )
    return client


def _fit(message: Message, context: Context, client: Any, net: str, trainloader: str, method: Method, task: Task) -> Message:
    """Answer a train message. The function is at module level: ``run_simulation`` pickles inner functions with all they use."""
    with training(message, context, getattr(client, net), method, getattr(client, trainloader), task=task) as round:
        with _replaced(client, net, round.model, "fit"):
            returned, samples, metrics = _returned("fit", client.fit(_arrays(round.model), _config(message)), list)
        _load(round.model, returned, type(client).__name__)
    numbers = _numbers(metrics)
    loss = next((float(numbers[name]) for name in LOSSES if name in numbers), None)
    reply = round.message(samples, loss, numbers)
    reply.content[SCALARS] = ConfigRecord(_plain(metrics))
    return reply


def _evaluate(message: Message, context: Context, client: Any, net: str, method: Method) -> Message:
    """Answer an evaluate message."""
    model = evaluating(message, context, getattr(client, net), method)
    with _replaced(client, net, model, "evaluate"):
        loss, samples, metrics = _returned("evaluate", client.evaluate(_arrays(model), _config(message)), float)
    own = MetricRecord({**_numbers(metrics), "loss": float(loss), EXAMPLES: samples})
    return Message(RecordDict({OWN_METRICS: own, SCALARS: ConfigRecord(_plain(metrics))}), reply_to=message)


@contextmanager
def _replaced(client: Any, net: str, model: nn.Module, doing: str) -> Iterator[None]:
    """Put the network of the round into the client's attribute ``net``. In the ``with`` block, the network before it must not run.

    Raises:
        ValueError: the network before it ran: an object of the user's, such as a trainer, has kept it.
    """
    before: nn.Module = getattr(client, net)
    setattr(client, net, model)

    def refuse(*_: Any) -> None:
        held = {name: [value, *getattr(value, "__dict__", {}).values()] for name, value in vars(client).items()}
        holders = [name for name, values in held.items() if any(value is before for value in values)]
        raise ValueError(
            f"{type(client).__name__}.{doing} ran the network that {net!r} held when the client was made"
            f"{f' (its attribute {holders[0]!r} has it)' if holders else ''}, but each round puts another network there: use self.{net} "
            f"in {doing}, or make what holds the network in {doing}"
        )

    hook = before.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _arrays(model: nn.Module) -> list[np.ndarray]:
    """Return copies of the network's arrays, as Flower gives them: training ``model`` does not change them."""
    return [tensor.detach().cpu().numpy().copy() for tensor in model.state_dict().values()]


def _config(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records.get("config", {}))


def _returned(what: str, value: Any, first: type) -> tuple[Any, int, dict[str, Any]]:
    """Return ``value``, which a client's ``fit`` or ``evaluate`` returned, if it is such a tuple as Flower expects.

    Raises:
        TypeError: ``value`` is no tuple of arrays (or the loss), number of samples, metrics.
    """
    match value:
        case (one, int(), dict()) if isinstance(value, tuple) and isinstance(one, first):
            return value
    raise TypeError(f"{what} must return ({first.__name__}, number of samples as int, dict of metrics), but returned {value!r:.200}")


def _load(model: nn.Module, returned: list[Any], kind: str) -> None:
    """Copy the arrays that ``fit`` returned into the model, since the user's code may have clipped them or added noise.

    Raises:
        ValueError: number or shapes of the arrays are not those of the model.
    """
    state = model.state_dict()
    if len(returned) != len(state):
        raise ValueError(
            f"{kind}.fit returned {len(returned)} arrays, but its network has {len(state)} tensors: return all of them. The method decides "
            "which tensors stay with the client"
        )
    for (name, tensor), array in zip(state.items(), returned, strict=True):
        given = torch.as_tensor(np.asarray(array), device=tensor.device)
        if given.shape != tensor.shape:
            raise ValueError(f"{kind}.fit returned shape {tuple(given.shape)} for {name}, but the network has shape {tuple(tensor.shape)}")
        if not torch.equal(given.to(tensor.dtype), tensor):
            tensor.copy_(given)


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``metrics`` with Python's numbers in place of NumPy's."""
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in metrics.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: value for name, value in _plain(metrics).items() if type(value) in (int, float)}


# The server


def legacy_server_app(server_fn: ServerFn, model: Callable[[], nn.Module], method: Method, **options: Any) -> ServerApp:
    """Return a ServerApp that runs the strategy of a legacy ``server_fn`` in rounds of ``method``.

    ``server_fn`` needs no change. Its strategy is Flower's older ``FedAvg``, or a class derived from it. Its
    fractions, numbers of clients, ``initial_parameters``, ``on_fit_config_fn``, ``on_evaluate_config_fn``,
    ``evaluate_fn`` and metric functions are all used. A class of the user's own may override ``evaluate``,
    ``aggregate_fit`` and ``aggregate_evaluate``. In the last two, ``super()`` returns what fl-bn computed from the
    replies. A ``Server`` of the user's own may override ``fit``: ``super().fit(...)`` runs the rounds, and returns
    Flower's ``History``, which ``run_in_process`` returns in turn, with all final arrays of the network as ``parameters``.

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
    if wrong := [name for name in options if name in NOT_OPTIONS]:
        raise ValueError(f"{wrong[0]} {NOT_OPTIONS[wrong[0]]}")
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        components = server_fn(context)
        config = components.config or ServerConfig()
        manager = components.client_manager or SimpleClientManager()
        server = components.server or Server(client_manager=manager, strategy=components.strategy)
        check_overrides(server, Server, "move its code to fit, around super().fit(...)")
        rounds = LegacyRounds(checked_strategy(server.strategy, method), model(), method, **options)

        def fit(self: Server, num_rounds: int, timeout: float | None) -> tuple[History, float]:
            begin, older = time.monotonic(), rounds.older
            evaluates = older.evaluate_fn is not None or type(older).evaluate is not FedAvg.evaluate
            at_server = rounds.at_server if evaluates else None
            result = rounds.start(grid, rounds.initial(manager), num_rounds, timeout, evaluate_fn=at_server)
            server.parameters = rounds.history.parameters = ndarrays_to_parameters(rounds.whole(result.arrays or ArrayRecord()))
            return rounds.history, time.monotonic() - begin

        put_between(server, Server, fit=fit)
        history, seconds = server.fit(num_rounds=config.num_rounds, timeout=config.round_timeout)
        log(logging.INFO, "[SUMMARY] %s rounds in %.2f s", config.num_rounds, seconds)
        for line in io.StringIO(str(history)):
            log(logging.INFO, "\t%s", line.strip("\n"))
        if isinstance(grid, InProcessGrid):
            grid.result = history

    return app


def checked_strategy(strategy: Any, method: Method) -> FedAvg:
    """Check that fl-bn's rounds can follow all settings and hooks of a strategy of Flower's older API, and return it.

    Raises:
        TypeError: the strategy is not derived from ``FedAvg``.
        ValueError: it overrides a hook that fl-bn's rounds do not call, or sets an option that they cannot follow.
    """
    if not isinstance(strategy, FedAvg):
        raise TypeError(f"expected a strategy derived from flwr.server.strategy.FedAvg, but server_fn gives a {type(strategy).__name__}")
    kind = type(strategy)
    flowers = next(one for one in kind.__mro__ if one.__module__.partition(".")[0] == "flwr")
    if flowers is not FedAvg:
        raise ValueError(
            f"{kind.__name__} is Flower's {flowers.__name__}, but fl-bn's rounds average by the method: take FedAvg, and the options "
            "optimizer=... or defence=... of legacy_server_app, or an objective in the clients' loop (docs/how-to/objectives.md)"
        )
    check_overrides(
        strategy,
        FedAvg,
        "give values for the clients by on_fit_config_fn. Or derive from a strategy of fl_bn.flower, whose hooks are called "
        "(docs/start/flower-app.md)",
    )
    if kind.aggregate_fit is not FedAvg.aggregate_fit and method.personal:
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


def check_overrides(thing: object, base: type, instead: str) -> None:
    """Raise ValueError if the class of ``thing`` overrides a method of ``base`` that fl-bn's rounds do not call."""
    kind = type(thing)
    if changed := [name for name in NOT_CALLED[base] if getattr(kind, name) is not getattr(base, name)]:
        raise ValueError(f"{kind.__name__} overrides {changed[0]}, which fl-bn's rounds do not call: {instead}")


def put_between(thing: Any, base: type, **methods: Callable[..., Any]) -> None:
    """Put ``methods`` between the class of ``thing`` and Flower's ``base``: ``super()`` in a user's override calls them."""
    between, kind = type(base.__name__, (base,), methods), type(thing)
    thing.__class__ = between if kind is base else type(kind.__name__, (kind, between), {})


@dataclass(frozen=True)
class Told:
    """Hold one client's results of a round, in place of Flower's ``FitRes`` or ``EvaluateRes``, for a user's aggregating hook.

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


class LegacyRounds(OwnAppStrategy):
    """Run fl-bn's rounds with an older strategy's configs, evaluation and metric functions, and write Flower's ``History``.

    Args:
        older: the strategy of ``server_fn``. Its aggregating hooks return fl-bn's results, also by ``super()``.
        model: the network, unconverted.
        method: the method.
        options: further arguments of ``OwnAppStrategy``.
    """

    def __init__(self, older: FedAvg, model: nn.Module, method: Method, **options: Any) -> None:
        super().__init__(model, method, **{name: getattr(older, attribute) for name, attribute in GIVEN.items()}, **options)
        self.older, self._model = older, model
        self.history: Any = History()  # with ``parameters`` at the end
        self._found: tuple[Any, Any] = None, {}  # what the older strategy's next aggregating hook returns
        found = lambda *_: self._found  # noqa: E731
        put_between(older, FedAvg, aggregate_fit=found, aggregate_evaluate=found)

    def initial(self, manager: Any) -> ArrayRecord | None:
        """Return the arrays of the strategy's ``initial_parameters`` by name; None if it has none."""
        if (parameters := self.older.initialize_parameters(manager)) is None:
            log(logging.INFO, "the strategy has no initial_parameters: the run starts from the server's network, not from a client's")
            return None
        return self._named("initial_parameters", parameters)

    def _named(self, what: str, parameters: Parameters) -> ArrayRecord:
        """Return the older API's list of arrays as a record, by the names of the network's state_dict.

        Raises:
            ValueError: the number of arrays is not the number of tensors in the state_dict. ``what`` names them.
        """
        arrays, state = parameters_to_ndarrays(parameters), self._model.state_dict()
        if len(arrays) != len(state):
            raise ValueError(
                f"{what} has {len(arrays)} arrays, but the network has {len(state)} tensors: give all of its state_dict. The method "
                "decides which tensors stay with the clients"
            )
        return ArrayRecord({name: torch.from_numpy(np.array(array)) for name, array in zip(state, arrays, strict=True)})

    def whole(self, arrays: ArrayRecord) -> list[np.ndarray]:
        """Return the arrays as a list in the order of the network's state_dict. Tensors that clients keep are the server's initial ones."""
        given = arrays.to_torch_state_dict()
        return [given.get(name, tensor).detach().cpu().numpy() for name, tensor in self._model.state_dict().items()]

    def at_server(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate by the older strategy, as ``evaluate_fn``."""
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

        ``fit_metrics_aggregation_fn`` combines the metrics that the clients' ``fit`` returned. If ``aggregate_fit`` returns no
        arrays, the round has failed.
        """
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        told = _told(replies, self.transport.cohort, {client.client for client in self.transport.record.accepted})
        if arrays is None or not told:
            return arrays, metrics
        given = ndarrays_to_parameters(self.whole(arrays))
        self._found = given, _means(self.older.fit_metrics_aggregation_fn, told)
        parameters, own = self.older.aggregate_fit(server_round, told, [])  # type: ignore[arg-type]
        if own:
            self.history.add_metrics_distributed_fit(server_round, own)
        if parameters is None:
            return None, None
        return (arrays if parameters is given else self._named("what aggregate_fit returned", parameters)), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the clients' losses, call the older strategy's ``aggregate_evaluate``, and store its results in the history.

        ``evaluate_metrics_aggregation_fn`` combines the metrics that the clients' ``evaluate`` returned.
        """
        replies = list(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        told = _told(replies, self.transport.evaluations.clients, self.transport.record.client_evaluation) if metrics is not None else []
        if metrics is None or not told:
            return metrics
        loss: Any = metrics.get("loss", math.nan)
        self._found = float(loss), _means(self.older.evaluate_metrics_aggregation_fn, told)
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


def _means(combine: Callable[[list[tuple[int, dict[str, Any]]]], dict[str, Any]] | None, told: list[tuple[Any, Told]]) -> dict[str, Any]:
    return {} if combine is None else combine([(one.num_examples, one.metrics) for _, one in told])


def _told(replies: Sequence[Message], clients: Sequence[Client], counted: Container[int]) -> list[tuple[Any, Told]]:
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
    return [(SimpleNamespace(cid=str(index)), given[index]) for index in sorted(given)]
