"""Strategies by name: a subclass overrides hooks, and whatever cannot work is refused in a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy

from fl_bn import EarlyStop, methods
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, InProcessGrid, OwnAppStrategy, Rounds, RunFailed
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, Objective, Scaffold
from fl_bn.secure.settings import SecureAggregation
from tests.documentation.pages import ROOT
from tests.flower import own_apps as apps
from tests.flower.own_apps import CLIENTS, begin, config, equal, grid, net, own_app, ran, refused, tensors
from tests.listed import listed
from tests.noted import noted


@listed(("name", "last"), [("lr", 0.0), ("learning_rate", 0), ("learning-rate", 0.05)])
def test_a_rate_that_a_hook_changes_is_the_round_s_and_at_0_statistics_rest(name: str, last: float) -> None:
    seen: list[float] = []

    class Falls(FBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            if server_round == 3:
                config[name] = last
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Falls(net(), fraction_evaluate=0)
    found = noted(strategy)
    app = own_app("fbn", rate=lambda message: seen.append(float(message.content["config"][name])) or seen[-1])
    result = ran(strategy, app, rounds=3, train_config=ConfigRecord({name: 0.1}))
    assert [record.learning_rate for record in result.records] == seen[::CLIENTS] == [0.1, 0.1, last]
    assert all(np.array_equal(found[2][key], found[3][key]) for key in found[3]) == (not last)  # control: at another rate, they move


# What hooks do of their own


def test_a_hook_may_leave_clients_out_and_change_what_is_aggregated() -> None:
    class Mine(FedAvgBN):
        def configure_train(self, server_round: int, *args: Any) -> Any:
            yield from list(super().configure_train(server_round, *args))[1:] if server_round < 3 else []  # hooks may be generators

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is None or server_round == 2:
                return None, None
            state = arrays.to_torch_state_dict()
            state["0.bias"] = torch.full_like(state["0.bias"], 3.0, dtype=torch.float64)  # rounded to the network's
            return ArrayRecord(state), MetricRecord({**metrics, "mine": 1.0})

    once, mine = (Mine(net(), fraction_evaluate=0, optimizer=server_optimizer("fedavgm")) for _ in range(2))
    first, result = ran(once, own_app("fedavg"), rounds=1), ran(mine, own_app("fedavg"), rounds=3)
    assert [[c.client for c in record.accepted] for record in result.records] == [[1, 2], [1, 2], []]
    assert [record.aggregated for record in result.records] == [True, False, False]  # a round that a hook rejects leaves no momentum
    of_one, of_three = ({k: b.tolist() for k, b in one.transport.server.optimizer.buffers().items()} for one in (once, mine))
    assert of_one == of_three != {}
    assert torch.equal(tensors(result)["0.bias"], torch.full((6,), 3.0))
    assert first.train_metrics_clientapp[1]["mine"] == 1.0


def test_a_hook_that_aggregates_by_itself_needs_no_super() -> None:
    class First(FedAvgBN):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            (first, *_) = replies
            return ArrayRecord({**first.content["fl-bn/weights"], **first.content["fl-bn/statistics"]}), None

    assert ran(First(net(), fraction_evaluate=0), own_app("fedavg")).records[0].aggregated


@listed(("method", "objective"), [("hbn", PLAIN), ("fedavg", Scaffold())])
def test_a_second_start_on_one_grid_is_a_new_beginning(method: str, objective: Objective) -> None:
    """A client that trained in the first run, and is drawn later in the second, has nothing of the first."""
    app, own = own_app(method, loop=apps.with_objective, objective=objective), METHODS[method]()

    def end(over: Any, rounds: int, **which: Any) -> Any:
        strategy = OwnAppStrategy(net(), own, min_train_nodes=1, fraction_evaluate=0, objective=objective, **which)
        return strategy.start(over, begin(), num_rounds=rounds)

    fresh = end(InProcessGrid(app, CLIENTS, {}), 3, fraction_train=0.34, seed=1)
    drawn = [client.client for record in fresh.records for client in record.clients]
    assert drawn[1] != drawn[0]
    over = InProcessGrid(app, CLIENTS, {})
    end(over, 1)  # all clients
    assert equal(end(over, 3, fraction_train=0.34, seed=1), fresh)


def test_attributes_of_a_subclass_replace_nothing_of_fl_bn() -> None:
    """Ordinary names: a user's strategy counts its ``rounds``, and keeps its best ``model``."""

    class Mine(HBN):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.model = self.rounds = self.method = self.rate = self.seed = self.optimizer = self.callbacks = self.flower = "mine"

    assert equal(ran(Mine(net()), own_app("hbn"), rounds=2), ran(HBN(net()), own_app("hbn"), rounds=2))


# What is refused


@listed(
    ("name", "value", "kind"),
    [
        ("fraction_train", 0.0, ValueError),
        ("fraction_evaluate", 1.5, ValueError),
        ("min_available_nodes", 1.5, ValueError),
        ("arrayrecord_key", "model", ValueError),
        ("configrecord_key", "fl-bn/config", ValueError),
        ("train_metrics_aggr_fn", 3, ValueError),
        ("client_weights", "equal", ValueError),
        ("callbacks", EarlyStop(2), ValueError),
        ("optimizer", "fedadam", ValueError),
        ("model", torch.nn.Linear, TypeError),
        ("method", methods.fbn, TypeError),
    ],
)
def test_an_argument_that_cannot_work_is_refused_by_name(name: str, value: Any, kind: type[Exception]) -> None:
    refused(lambda: OwnAppStrategy(**{"model": net(), "method": methods.fbn(), name: value}), kind, name)


def arrays(**changed: Any) -> ArrayRecord:
    """The network's arrays, some of them replaced, or, for None, left out."""
    values = {**net().state_dict(), **{name.replace("_", ".", 1): tensor for name, tensor in changed.items()}}
    return ArrayRecord({name: tensor for name, tensor in values.items() if tensor is not None})


@listed(
    ("options", "named", "kind", "word"),
    [
        ({}, {"num_rounds": -1}, ValueError, "num_rounds"),
        ({}, {"timeout": True}, ValueError, "timeout"),
        ({"rate": lambda *_: float("nan")}, {}, ValueError, "rate"),
        ({"rate": 0.1}, {}, ValueError, "rate"),
        ({}, {"train_config": config(lr=-0.1)}, ValueError, "rate"),
        ({}, {"initial_arrays": arrays(**{"0_bias": torch.zeros(9)})}, ValueError, "0.bias"),
        ({}, {"initial_arrays": arrays(**{"0_bias": None})}, ValueError, "0.bias"),
        ({}, {"evaluate_fn": lambda *_: (0.5, {})}, RunFailed, "evaluate_fn"),
        ({"train_metrics_aggr_fn": lambda *_: {}}, {}, RunFailed, "train_metrics_aggr_fn"),
    ],
)
def test_a_start_that_cannot_work_is_refused_by_name(options: Any, named: Any, kind: type[Exception], word: str) -> None:
    refused(lambda: FixBN(net(), **options).start(grid("fixbn"), **{"num_rounds": 1, **named}), kind, word)


@listed(
    ("hook", "change", "word"),
    [
        ("configure_train", lambda own: [*own, Message(list(own)[0].content, 99, "train")], "1, 2, 3, 99"),
        ("configure_train", lambda own: [*own, list(own)[0]], "1, 2, 3, 1"),
        ("configure_evaluate", lambda own: None, "configure_evaluate"),
        ("aggregate_train", lambda own: None, "aggregate_train"),
        ("aggregate_train", lambda own: (arrays(**{"0_bias": torch.zeros(5)}), None), "0.bias"),
        ("aggregate_train", lambda own: (arrays(**{"0_bias": torch.full((6,), np.nan)}), None), "0.bias"),
        ("aggregate_train", lambda own: (arrays(**{"1_running_var": torch.full((6,), -9.0)}), None), "1.running_var"),
        ("aggregate_train", lambda own: (arrays(**{"1_weight": None}), None), "1.weight"),
        ("aggregate_evaluate", lambda own: (0.5, {}), "aggregate_evaluate"),
    ],
)
def test_what_a_hook_returns_that_cannot_be_is_refused_by_name(hook: str, change: Any, word: str) -> None:
    refused(lambda: ran(apps.overriding(FedAvgBN, hook, change)(net()), own_app("fedavg")), RunFailed, word)


def test_a_hook_that_a_secure_sum_never_calls_is_refused() -> None:
    strategy = apps.overriding(FedAvgBN, "aggregate_train")(net(), Rounds(CLIENTS), secure=SecureAggregation())
    refused(lambda: ran(strategy, own_app("fedavg")), ValueError, "aggregate_train")


# Hooks that somebody else calls


@listed(
    "call",
    [
        lambda one: one.configure_train(1, begin(), ConfigRecord(), grid("fedbn")),
        lambda one: Strategy.start(one, grid("fedbn"), begin(), num_rounds=1),
        lambda one: DifferentialPrivacyServerSideFixedClipping(one, 0.1, 1.0, CLIENTS).start(grid("fedbn"), begin(), num_rounds=1),
    ],
    ids=["a hook", "Flower's loop", "noise"],
)
def test_hooks_that_somebody_else_calls_say_what_to_do(call: Callable[[Strategy], Any]) -> None:
    refused(lambda: call(FedBN(net())), RunFailed, "FedBN", "strategy.start(")


def test_the_start_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec((ROOT / "docs/how-to/collisions.md").read_text().split("```python\n")[1].split("```")[0], names)
    mine, plain = (ran(kind(net()), own_app("fedbn"), rounds=2, train_config=config(lr=0.1)) for kind in (names["Mine"], FedBN))
    assert equal(mine, plain)
    assert capsys.readouterr().out.count("my_acc") == 2
