"""Apps of Flower's older API: a ``NumPyClient`` and a ``server_fn`` run as they are, or the error says which part does not."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import History, Server, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAdam, FedAvg
from torch.nn import functional as F

from fl_bn.flower import RunFailed, legacy_client_app, legacy_server_app, run_in_process
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, data, net, overriding, refused
from tests.listed import listed


class Batches(list):
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
    return {"lr": np.float64(0.1 / server_round), **({"first": True} if server_round == 1 else {})}


def ran(
    method: str = "fedavg",
    client: Callable[[Context], Any] = Client,
    strategy: type[FedAvg] = FedAvg,
    server: Callable[[FedAvg], Server] | None = None,
    rounds: int = 2,
    mods: Sequence[Any] = (),
    **arguments: Any,
) -> History:
    """Run an app of the older API; return its history."""
    chosen = METHODS[method]()

    def server_fn(context: Context) -> ServerAppComponents:
        made = strategy(**{"on_fit_config_fn": lr, **arguments})
        parts: dict[str, Any] = {"strategy": made} if server is None else {"server": server(made)}
        return ServerAppComponents(config=ServerConfig(num_rounds=rounds), **parts)

    served = legacy_client_app(lambda context: client(context), chosen, mods=mods)
    return run_in_process({"clients": CLIENTS}, server_app=legacy_server_app(server_fn, net, chosen), client_app=served)


def test_metrics_with_text_reach_the_user_s_functions() -> None:
    seen: dict[str, Any] = {}
    ran(
        fit_metrics_aggregation_fn=lambda metrics: {"sites": len(seen.setdefault("fit", metrics))},
        evaluate_metrics_aggregation_fn=lambda metrics: {"sites": len(seen.setdefault("evaluate", metrics))},
        on_evaluate_config_fn=lambda r: {"deep": True},
    )
    assert seen["fit"] == [(SAMPLES, {"site": f"site {i}", "lr": 0.1, "big": i > 0}) for i in range(CLIENTS)]
    assert seen["evaluate"] == [(SAMPLES, {"site": f"site {i}", "asked": "['deep', 'server-round']"}) for i in range(CLIENTS)]


def test_the_history_comes_back_as_from_start_simulation() -> None:
    """What Flower's baselines do with it: niid_bench gives a ``Server`` with a ``fit`` and pickles the history."""
    seen: list[Any] = []

    def evaluate(server_round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        return 2.0 - server_round, {"accuracy": server_round / 4}

    def server(strategy: FedAvg) -> Server:
        kind = overriding(Server, "fit", lambda result: seen.append(result) or result)
        return kind(strategy=strategy, client_manager=SimpleClientManager())

    loaded = pickle.loads(pickle.dumps(ran(server=server, evaluate_fn=evaluate)))
    assert isinstance(loaded, History)
    assert loaded.metrics_centralized["accuracy"] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert loaded.losses_centralized == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert [server_round for server_round, _ in loaded.losses_distributed] == [1, 2]
    assert [array.shape for array in parameters_to_ndarrays(loaded.parameters)] == [array.shape for array in net().state_dict().values()]
    assert seen[0][0].losses_distributed == loaded.losses_distributed  # what the server's own fit got


class Saves(FedAvg):
    """Keeps the model of every round, as Flower's documentation shows it, and returns another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saved, self.seen = list[list[np.ndarray]](), list[Any]()
        STRATEGIES.append(self)

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        self.saved.append(parameters_to_ndarrays(parameters))
        self.seen.append((metrics, [(client.cid, result.num_examples, result.metrics["site"]) for client, result in results]))
        return ndarrays_to_parameters([array / 2 for array in self.saved[-1]]), metrics


STRATEGIES: list[Saves] = []


def test_the_hooks_of_a_strategy_of_one_s_own_are_called_with_what_the_method_made_and_change_it() -> None:
    seen: list[Any] = []
    of_sites = {"fit_metrics_aggregation_fn": lambda metrics: {"sites": len(metrics)}}
    ran("fbn", strategy=Saves, evaluate_fn=lambda server_round, arrays, config: seen.append(arrays), **of_sites)
    strategy = STRATEGIES.pop()
    for name, made, one in zip(net().state_dict(), strategy.saved[1], seen[2], strict=True):
        assert "tracked" in name or np.allclose(one, made / 2)
    assert not np.allclose(strategy.saved[1][0], seen[1][0])  # control: another round
    assert strategy.seen[0] == ({"sites": CLIENTS}, [(str(i), SAMPLES, f"site {i}") for i in range(CLIENTS)])


class Counts(FedAvg):
    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        assert (len(results), len(failures)) == (CLIENTS - 1, 1)
        return super().aggregate_fit(server_round, results, failures)


def test_a_client_that_fails_is_a_failure_which_a_strategy_need_not_accept() -> None:
    client = overriding(Client, "fit", lambda result: result[: 2 + (result[2]["site"] != "site 1")])
    ran(client=client, strategy=Counts, rounds=1)
    refused(lambda: ran(client=client, accept_failures=False, rounds=1), RunFailed, "nothing was trained")


# What is refused


@listed(
    ("arguments", "word"),
    [
        ({"strategy": overriding(FedAvg, "configure_fit")}, "configure_fit"),
        ({"strategy": overriding(FedAvg, "aggregate_fit"), "method": "fedbn"}, "aggregate_fit"),
        ({"strategy": FedAdam, "initial_parameters": ndarrays_to_parameters([np.zeros(1)] * 2)}, "FedAdam"),
        ({"initial_parameters": ndarrays_to_parameters([np.zeros(1)] * 2)}, "has 2"),
        ({"server": lambda s: overriding(Server, "fit_round")(client_manager=SimpleClientManager(), strategy=s)}, "fit_round"),
    ],
    ids=str,
)
def test_a_server_that_cannot_run_is_refused_by_name(arguments: dict[str, Any], word: str) -> None:
    refused(lambda: ran(**arguments), ValueError, word)


@listed(
    ("client", "word"),
    [
        (lambda context: object(), "trainloader"),
        (overriding(Client, "fit", lambda result: (result[0][:4], *result[1:])), "has 4"),
        (overriding(Client, "fit", lambda result: result[:2]), "values to unpack"),
    ],
)
def test_a_client_that_cannot_run_is_refused_by_name(client: Any, word: str) -> None:
    refused(lambda: ran(client=client, rounds=1), RunFailed, word)


SENT: list[Callable[[Any], object]] = [
    lambda content: content.pop("metrics"),
    lambda content: content["metrics"].update({"loss": [1.0]}),
    lambda content: content["metrics"].update({"num-examples": -(10**9)}),
]


@listed("sent", SENT, ids=["no metrics", "a list", "samples below 0"])
def test_one_client_s_metrics_do_not_end_the_run(sent: Callable[[Any], object]) -> None:
    seen: dict[str, list[int]] = {}

    def noting(what: str) -> Callable[[Any], dict[str, Any]]:
        return lambda results: seen.update({what: [samples for samples, _ in results]}) or {}

    def tampering(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if client_of(context) == 1 and message.metadata.message_type in ("train", "evaluate"):
            sent(reply.content)
        return reply

    ran(mods=[tampering], fit_metrics_aggregation_fn=noting("fit"), evaluate_metrics_aggregation_fn=noting("test"))
    assert seen.keys() == {"fit", "test"}
    assert all(samples == [SAMPLES] * len(samples) and len(samples) in (2, 3) for samples in seen.values())
