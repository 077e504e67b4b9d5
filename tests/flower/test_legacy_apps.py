"""Apps of Flower's older API: a ``NumPyClient`` and a ``server_fn`` run as they are, or the error says which part does not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAdam, FedAvg
from ray import cloudpickle
from torch.nn import functional as F

from fl_bn import Callback
from fl_bn.flower import Gate, InProcessGrid, RunFailed, legacy_client_app, legacy_server_app, run_in_process
from fl_bn.flower.wire.gate import KINDS
from fl_bn.methods import METHODS, Method, fedavg
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, data, net
from tests.in_process import WatchedGrid

Loader = Any


class Batches(list):  # type: ignore[type-arg]
    """A loader with a data set, as ``DataLoader`` has it."""

    dataset = range(SAMPLES)


class Client(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.net, self.trainloader, self.context = net(3), Batches(data(client_of(context))), context

    def arrays(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.net.state_dict().values()]

    def load(self, parameters: list[np.ndarray]) -> None:
        state = self.net.state_dict()
        self.net.load_state_dict({name: torch.tensor(array) for name, array in zip(state, parameters, strict=True)})

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=config["lr"])
        self.net.train()
        for x, y in self.trainloader:
            optimizer.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            optimizer.step()
        return self.arrays(), SAMPLES, {"site": f"site {client_of(self.context)}", "lr": config["lr"], "big": client_of(self.context) > 0}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        self.net.eval()
        with torch.no_grad():
            loss = sum(F.cross_entropy(self.net(x), y).item() for x, y in self.trainloader)
        return loss, SAMPLES, {"site": f"site {client_of(self.context)}", "asked": str(sorted(config))}


def lr(server_round: int) -> dict[str, Any]:
    return {"lr": 0.1 / server_round, **({"first": True} if server_round == 1 else {})}


def ran(
    method: str | Method = "fedavg",
    client: Callable[[Context], Any] = Client,
    strategy: type[FedAvg] = FedAvg,
    server: Callable[[FedAvg], Server] | None = None,
    rounds: int = 2,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> WatchedGrid:
    chosen = METHODS[method]() if isinstance(method, str) else method

    def server_fn(context: Context) -> ServerAppComponents:
        made = strategy(on_fit_config_fn=lr, **arguments)
        parts: dict[str, Any] = {"strategy": made} if server is None else {"server": server(made)}
        return ServerAppComponents(config=ServerConfig(num_rounds=rounds), **parts)

    grid = WatchedGrid(legacy_client_app(lambda context: client(context), chosen), CLIENTS)
    legacy_server_app(server_fn, net, chosen, **(options or {}))(grid, Context(1, 0, {}, RecordDict(), {}))
    return grid


def test_metrics_with_text_reach_the_user_s_functions() -> None:
    seen: dict[str, Any] = {}

    def fitted(metrics: list[Any]) -> dict[str, Any]:
        seen.setdefault("fit", metrics)
        return {"sites": len(metrics)}

    def evaluated(metrics: list[Any]) -> dict[str, Any]:
        seen.setdefault("evaluate", metrics)
        return {}

    ran(fit_metrics_aggregation_fn=fitted, evaluate_metrics_aggregation_fn=evaluated, on_evaluate_config_fn=lambda r: {"deep": True})
    assert seen["fit"] == [(SAMPLES, {"site": f"site {i}", "lr": 0.1, "big": i > 0}) for i in range(CLIENTS)]
    assert seen["evaluate"] == [(SAMPLES, {"site": f"site {i}", "asked": "['deep', 'server-round']"}) for i in range(CLIENTS)]


def test_each_round_s_config_is_its_own() -> None:
    sent = [dict(m.content["config"]) for m in ran(rounds=2).sent if m.metadata.message_type == "train"]  # type: ignore[arg-type]
    assert sent == [{"lr": 0.1, "first": True, "server-round": 1}] * CLIENTS + [{"lr": 0.05, "server-round": 2}] * CLIENTS


def test_the_evaluation_at_the_server_gets_all_arrays_of_the_network() -> None:
    seen: dict[int, list[np.ndarray]] = {}

    def evaluate(server_round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        seen[server_round] = arrays
        net().load_state_dict({name: torch.tensor(array) for name, array in zip(net().state_dict(), arrays, strict=True)})
        return 1.0, {"mine": 0.5}

    start = [tensor.numpy() for tensor in net(7).state_dict().values()]
    ran("fbn", evaluate_fn=evaluate, initial_parameters=ndarrays_to_parameters(start), options={"unit_scale": False, "calibrate": 0})
    assert [*seen] == [0, 1, 2]
    assert all(np.array_equal(one, other) for one, other in zip(seen[0], start, strict=True))
    assert not any(np.array_equal(seen[2][i], start[i]) for i in (0, 4, 5))  # weights, and statistics


def test_what_a_client_keeps_is_kept() -> None:
    states = ran("fedbn").states()
    kept = [state["fl-bn/local"].to_torch_state_dict() for state in states]  # type: ignore[union-attr]
    assert not torch.equal(kept[0]["1.running_mean"], kept[1]["1.running_mean"])


def test_a_server_of_one_s_own_gets_the_history() -> None:
    found: dict[str, Any] = {}

    class Saves(Server):
        def fit(self, num_rounds: int, timeout: float | None) -> Any:
            history, elapsed = super().fit(num_rounds, timeout)
            found.update(history=history, elapsed=elapsed, parameters=self.parameters)
            return history, elapsed

    ran(server=lambda strategy: Saves(client_manager=SimpleClientManager(), strategy=strategy))
    assert [round for round, _ in found["history"].losses_distributed] == [1, 2]
    assert len(found["parameters"].tensors) == len(net().state_dict())
    assert found["elapsed"] > 0


def test_the_history_comes_back_as_from_start_simulation(tmp_path: Path) -> None:
    """What Flower's baselines do with it: niid_bench gives a ``Server`` and pickles the history, moon draws it."""
    servers: list[Server] = []

    def evaluate(server_round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        return 2.0 - server_round, {"accuracy": server_round / 4}

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = FedAvg(on_fit_config_fn=lr, evaluate_fn=evaluate)
        servers.append(Server(strategy=strategy, client_manager=SimpleClientManager()))
        return ServerAppComponents(server=servers[0], config=ServerConfig(num_rounds=2))

    apps: dict[str, Any] = {"server_app": legacy_server_app(server_fn, net, fedavg()), "client_app": legacy_client_app(Client, fedavg())}
    history = run_in_process({"clients": CLIENTS}, **apps)
    (tmp_path / "history.pkl").write_bytes(pickle.dumps(history))
    loaded = pickle.loads((tmp_path / "history.pkl").read_bytes())
    assert isinstance(loaded, History)
    rounds, values = zip(*loaded.metrics_centralized["accuracy"], strict=True)
    assert (rounds, values) == ((0, 1, 2), (0.0, 0.25, 0.5))
    assert loaded.losses_centralized == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert [server_round for server_round, _ in loaded.losses_distributed] == [1, 2]
    assert repr(loaded).startswith("History (loss, distributed):")
    final = parameters_to_ndarrays(loaded.parameters)
    assert all(np.array_equal(one, other) for one, other in zip(final, parameters_to_ndarrays(servers[0].parameters), strict=True))
    assert not np.array_equal(final[0], net().state_dict()["0.weight"].numpy())  # control


def test_an_app_that_was_pickled_answers_with_the_same_bits() -> None:
    """As Flower's ``run_simulation`` sends it to Ray."""
    app = legacy_client_app(Client, METHODS["hbn"]())

    def last(app: Any) -> list[np.ndarray]:
        seen: list[Any] = []

        def server_fn(context: Context) -> ServerAppComponents:
            strategy = FedAvg(on_fit_config_fn=lr, evaluate_fn=lambda server_round, arrays, config: seen.append(arrays))
            return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

        legacy_server_app(server_fn, net, METHODS["hbn"]())(InProcessGrid(app, CLIENTS, {}), Context(1, 0, {}, RecordDict(), {}))
        return seen[-1]  # type: ignore[no-any-return]

    plain, pickled = last(app), last(cloudpickle.loads(cloudpickle.dumps(app)))
    assert all(np.array_equal(one, other) for one, other in zip(plain, pickled, strict=True))


def test_arrays_that_fit_changed_after_training_count() -> None:
    class Zeros(Client):
        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
            arrays, samples, metrics = super().fit(parameters, config)
            return [np.zeros_like(array) for array in arrays], samples, metrics

    def last(client: Any) -> list[np.ndarray]:
        found: list[Any] = []
        ran(client=client, evaluate_fn=lambda server_round, arrays, config: found.append(arrays), rounds=1)
        return found[-1]  # type: ignore[no-any-return]

    assert not np.any(last(Zeros)[0])
    assert np.any(last(Client)[0])  # control


def test_callbacks_are_called() -> None:
    class Counts(Callback):
        rounds = 0

        def on_round(self, record: Any, rounds: int) -> None:
            self.rounds += 1

    counts = Counts()
    ran(options={"callbacks": [counts]})
    assert counts.rounds == 2


class Saves(FedAvg):
    """Keeps the model of every round, as Flower's documentation shows it, and combines by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saved, self.seen = list[list[np.ndarray]](), list[Any]()
        STRATEGIES.append(self)

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        assert parameters is not None
        self.saved.append(parameters_to_ndarrays(parameters))
        self.seen.append((metrics, [(client.cid, result.num_examples, result.metrics["site"]) for client, result in results]))
        return parameters, {**metrics, "mine": 1.0}

    def aggregate_evaluate(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        loss, metrics = super().aggregate_evaluate(server_round, results, failures)
        weights = [result.num_examples for _, result in results]
        assert loss == pytest.approx(np.average([result.loss for _, result in results], weights=weights))
        return loss, metrics


class Halves(FedAvg):
    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        assert parameters is not None
        return ndarrays_to_parameters([array / 2 for array in parameters_to_ndarrays(parameters)]), metrics


class Reads(FedAvg):
    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        return results[0][1].parameters, {}


STRATEGIES: list[Saves] = []


def evaluated(**arguments: Any) -> list[list[np.ndarray]]:
    seen: list[Any] = []
    ran("fbn", evaluate_fn=lambda server_round, arrays, config: seen.append(arrays), **arguments)
    return seen


def test_the_hooks_of_a_strategy_of_one_s_own_are_called_with_what_the_method_made() -> None:
    seen = evaluated(strategy=Saves, fit_metrics_aggregation_fn=lambda metrics: {"sites": len(metrics)})
    strategy = STRATEGIES.pop()
    same = [np.array_equal(one, other) for one, other in zip(strategy.saved[1], seen[2], strict=True)]
    assert [name for name, equal in zip(net().state_dict(), same, strict=True) if not equal] in ([], ["1.num_batches_tracked"])
    assert not np.array_equal(strategy.saved[1][0], seen[1][0])  # control: another round
    assert strategy.seen[0] == ({"sites": CLIENTS}, [(str(i), SAMPLES, f"site {i}") for i in range(CLIENTS)])


def test_arrays_that_its_hook_changes_count() -> None:
    plain, halved = evaluated(rounds=1), evaluated(strategy=Halves, rounds=1)
    assert np.allclose(halved[1][0], plain[1][0] / 2)


def test_a_hook_that_reads_one_client_s_arrays_is_told_that_there_are_none() -> None:
    with pytest.raises(AttributeError, match="fl-bn has no list of one client's arrays"):
        ran(strategy=Reads, rounds=1)


def through(gate: Gate) -> WatchedGrid:
    grid = WatchedGrid(legacy_client_app(Client, fedavg(), mods=[gate]), CLIENTS)

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=FedAvg(on_fit_config_fn=lr), config=ServerConfig(num_rounds=1))

    legacy_server_app(server_fn, net, fedavg())(grid, Context(1, 0, {}, RecordDict(), {}))
    return grid


def test_a_gate_lets_metrics_with_text_leave_once_they_are_declared() -> None:
    with pytest.raises(RunFailed, match=r"a reply to train may hold .*, but this one has \['scalars'\]"):
        through(Gate())
    declared = {kind: replace(KINDS[kind], records=KINDS[kind].records | {"scalars"}) for kind in ("train", "evaluate")}
    assert through(Gate({**KINDS, **declared})).kinds()[-2:] == ["train 1", "evaluate 1"]


# What is refused


class OwnSample(FedAvg):
    def configure_fit(self, *args: Any) -> Any:
        return super().configure_fit(*args)


class OwnAggregation(FedAvg):
    def aggregate_fit(self, *args: Any) -> Any:
        return super().aggregate_fit(*args)


class OwnRound(Server):
    def fit_round(self, *args: Any) -> Any:
        return super().fit_round(*args)


def parameters_of(count: int) -> Any:
    return ndarrays_to_parameters([np.zeros(1)] * count)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"strategy": OwnSample}, "OwnSample overrides configure_fit, which fl-bn's rounds do not call"),
        ({"strategy": OwnAggregation, "method": "fedbn"}, "overrides aggregate_fit, but under fedbn the clients keep tensors"),
        ({"strategy": FedAdam, "initial_parameters": parameters_of(2)}, "FedAdam is Flower's FedAdam, but .* optimizer="),
        ({"server": lambda s: OwnRound(client_manager=SimpleClientManager(), strategy=s)}, "OwnRound overrides fit_round"),
        ({"accept_failures": False}, "accept_failures=False has no meaning here"),
        ({"initial_parameters": parameters_of(3)}, "initial_parameters has 3 arrays, but the network has 9 tensors"),
        ({"options": {"fraction_train": 0.5}}, "fraction_train is given by the strategy of server_fn: set it there, as fraction_fit"),
    ],
)
def test_a_server_that_cannot_run_is_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ran(**arguments)


class Renamed(Client):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model = self.net
        del self.net


class Unloaded(Client):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        del self.trainloader


class Holds(Client):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)


class Short(Client):
    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        arrays, samples, metrics = super().fit(parameters, config)
        return arrays[:4], samples, metrics


class Pair(Client):
    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        return super().fit(parameters, config)[:2]


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (Renamed, r"Renamed has no network in its attribute 'net' \(networks are in: model\)"),
        (Unloaded, "Unloaded has no attribute 'trainloader'"),
        (Holds, "Holds makes its optimizer 'optimizer' in its constructor"),
        (lambda context: object(), "client_fn must return a NumPyClient"),
        (Short, "Short.fit returned 4 arrays, but its network has 9 tensors"),
        (Pair, r"fit must return \(list, number of samples as int, dict of metrics\)"),
    ],
)
def test_a_client_that_cannot_run_is_refused_by_name(client: Any, said: str) -> None:
    with pytest.raises(RunFailed, match=said):
        ran(client=client, rounds=1)


def test_other_names_of_the_attributes() -> None:
    class Other(Client):
        """Its network is ``model``, its batches are ``loader``."""

        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.__dict__.update(model=self.__dict__.pop("net"), loader=self.__dict__.pop("trainloader"))

        def __getattr__(self, name: str) -> Any:
            return self.__dict__[{"net": "model", "trainloader": "loader"}[name]]

    app = legacy_client_app(lambda context: Other(context).to_client(), fedavg(), net="model", trainloader="loader")
    result: list[Any] = []

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = FedAvg(on_fit_config_fn=lr, evaluate_metrics_aggregation_fn=lambda metrics: result.append(metrics) or {})
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=1))

    legacy_server_app(server_fn, net, fedavg())(InProcessGrid(app, CLIENTS, {}), Context(1, 0, {}, RecordDict(), {}))
    assert len(result[0]) == CLIENTS


def test_a_client_that_lacks_a_metric_counts_all_the_same(log: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    class Lacks(Client):
        def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
            client = client_of(self.context)
            return 1.0 + client, SAMPLES, {"acc": 0.1} | ({"f1": 0.5} if client else {})

    def evaluated(metrics: list[Any]) -> dict[str, Any]:
        seen.append(metrics)
        return {"clients": len(metrics)}

    ran(client=Lacks, rounds=1, evaluate_metrics_aggregation_fn=evaluated)
    assert seen == [[(SAMPLES, {"acc": 0.1}), *[(SAMPLES, {"acc": 0.1, "f1": 0.5})] * 2]]
    assert "round 1: 2.0" in log.text  # the mean of 1, 2 and 3, in Flower's history
    assert "metrics that not all clients send are not averaged: f1" in log.text


def test_the_run_says_that_it_starts_from_the_server_s_network(log: pytest.LogCaptureFixture) -> None:
    ran(rounds=1)
    assert "the strategy has no initial_parameters: the run starts from the server's network, not from a client's" in log.text
    log.clear()
    ran(rounds=1, initial_parameters=ndarrays_to_parameters([tensor.numpy() for tensor in net().state_dict().values()]))
    assert "initial_parameters" not in log.text  # control


def test_a_learning_rate_of_numpy_s_is_followed() -> None:
    class Strategy(FedAvg):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**arguments, "on_fit_config_fn": lambda round: {"lr": np.float64(0.1)}})

    sent = [dict(m.content["config"]) for m in ran("fixbn", strategy=Strategy, rounds=4).sent if m.metadata.message_type == "train"]  # type: ignore[arg-type]
    assert [values["lr"] for values in sent[:CLIENTS]] == [0.1] * CLIENTS
    assert sent[-1]["lr"] < 0.1  # a frozen round


def test_what_fit_received_stays_as_it_was_while_the_client_trains() -> None:
    """A client that bounds its own update, the difference to what it received. Before, it saw no difference, and sent all of it."""
    seen: list[float] = []

    class Bounding(Client):
        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
            before = [array.copy() for array in parameters]
            arrays, samples, metrics = super().fit(parameters, config)
            assert all(np.array_equal(one, other) for one, other in zip(before, parameters, strict=True))
            seen.append(sum(float(np.abs(new - old).sum()) for new, old in zip(arrays, parameters, strict=True)))
            return parameters, samples, metrics  # nothing of it is sent

    grid = ran(client=Bounding)
    assert min(seen) > 0.1
    first, second = (grid.train(round)[0]["weights"] for round in (1, 2))
    assert all(np.allclose(first[name], second[name], rtol=0, atol=1e-6) for name in first)


SENT: dict[str, Callable[[Any], object]] = {
    "no metrics": lambda content: content.pop("metrics"),
    "another name": lambda content: content.update({"mine": content.pop("metrics")}),
    "a list": lambda content: content["metrics"].update({"loss": [1.0]}),
    "samples below 0": lambda content: content["metrics"].update({"num-examples": -(10**9)}),
}


@pytest.mark.parametrize("sent", SENT)
def test_one_client_s_metrics_do_not_end_the_run(sent: str) -> None:
    """Before, the server ended with a KeyError or a TypeError, or took a weight of -1e9 for the mean of the losses."""
    seen: list[tuple[str, list[int]]] = []

    def noting(what: str) -> Callable[[Any], dict[str, Any]]:
        def combine(results: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
            seen.append((what, [samples for samples, _ in results]))
            return {}

        return combine

    class Tampering(WatchedGrid):
        def _answered(self, messages: list[Message]) -> list[Message]:
            replies = list(super()._answered(messages))
            for message, reply in zip(messages, replies, strict=True):
                if message.metadata.dst_node_id == 2 and message.metadata.message_type in ("train", "evaluate"):
                    SENT[sent](reply.content)
            return replies

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = FedAvg(on_fit_config_fn=lr, fit_metrics_aggregation_fn=noting("fit"), evaluate_metrics_aggregation_fn=noting("test"))
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

    grid = Tampering(legacy_client_app(Client, fedavg()), CLIENTS)
    legacy_server_app(server_fn, net, fedavg())(grid, Context(1, 0, {}, RecordDict(), {}))
    assert {what for what, _ in seen} == {"fit", "test"}
    assert all(samples == [SAMPLES] * len(samples) and len(samples) in (2, 3) for _, samples in seen)
