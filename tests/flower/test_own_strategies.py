"""Strategies by name: a subclass overrides hooks, and whatever cannot work is refused in a sentence that says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyServerSideFixedClipping, Strategy

from fl_bn import EarlyStop, convert, methods
from fl_bn.flower import (
    FBN,
    HBN,
    FedAvgBN,
    FedBN,
    FixBN,
    InProcessGrid,
    OwnAppStrategy,
    Rounds,
    RunFailed,
)
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, Scaffold
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
            if arrays is None:
                return None, None
            state = arrays.to_torch_state_dict()
            state["0.bias"] = torch.full_like(state["0.bias"], 3.0, dtype=torch.float64)  # rounded to the network's
            return ArrayRecord(state), MetricRecord({**metrics, "mine": 1.0})

    result = ran(Mine(net(), fraction_evaluate=0), own_app("fedavg"), rounds=3)
    assert [[c.client for c in record.accepted] for record in result.records] == [[1, 2], [1, 2], []]
    assert torch.equal(tensors(result)["0.bias"], torch.full((6,), 3.0))
    assert result.train_metrics_clientapp[2]["mine"] == 1.0


def test_a_hook_that_aggregates_by_itself_needs_no_super() -> None:
    class First(FedAvgBN):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            (first, *_) = replies
            return ArrayRecord({**first.content["fl-bn/weights"], **first.content["fl-bn/statistics"]}), None

    result = ran(First(net(), fraction_evaluate=0), own_app("fedavg"), rounds=2)
    assert all(record.aggregated for record in result.records)
    assert not torch.equal(tensors(result)["0.weight"], net()[0].weight)


def test_a_strategy_can_be_copied_and_pickled() -> None:
    wanted = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg"))
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        assert equal(ran(copied(FedAvgBN(net(), fraction_evaluate=0)), own_app("fedavg")), wanted)


@listed("method", ["fedbn", "hbn", "scaffold"])
def test_a_second_start_on_one_grid_is_a_new_beginning(method: str) -> None:
    """A client that trained in the first run, and is drawn later in the second, kept tensors of the first without a word."""
    objective = Scaffold() if method == "scaffold" else PLAIN
    own = METHODS["fedavg" if method == "scaffold" else method]()
    app = own_app(own, loop=apps.with_objective, objective=objective)

    def end(over: Any, rounds: int, seed: int) -> tuple[Any, list[list[int]]]:
        strategy = OwnAppStrategy(net(), own, fraction_train=0.34, min_train_nodes=1, fraction_evaluate=0, seed=seed, objective=objective)
        result = strategy.start(over, begin(), num_rounds=rounds)
        return result, [[client.client for client in record.clients] for record in result.records]

    fresh, drawn = end(InProcessGrid(app, CLIENTS, {}), 3, 1)
    met = 0
    for seed in range(6):
        over = InProcessGrid(app, CLIENTS, {})
        _, first = end(over, 1, seed)
        again, same = end(over, 3, 1)
        assert same == drawn
        assert equal(again, fresh), f"client {first[0]} trained before"
        met += first[0] == drawn[1] != drawn[0]
    assert met  # of these the case that was wrong


# Names of a subclass

MINE = ("model", "rounds", "method", "rate", "seed", "clients", "optimizer", "defence", "callbacks", "payload", "exchange", "flower")


def test_attributes_of_a_subclass_replace_nothing_of_fl_bn() -> None:
    """Ordinary names: a user's strategy counts its ``rounds``, and keeps its best ``model``."""

    class Mine(HBN):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for attribute in MINE:
                setattr(self, attribute, "mine")

    assert equal(ran(Mine(net()), own_app("hbn"), rounds=2), ran(HBN(net()), own_app("hbn"), rounds=2))


def test_flower_s_arguments_that_a_subclass_sets_count_until_the_run_begins() -> None:
    class Mine(FedAvgBN):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.fraction_train, self.fraction_evaluate = 0.5, 0.0

        def configure_train(self, server_round: int, *args: Any) -> Any:
            self.fraction_train = 1.0 if server_round > 1 else 0.5
            return super().configure_train(server_round, *args)

    result = ran(Mine(net(), min_train_nodes=1), own_app("fedavg"), rounds=2)
    assert [len(record.clients) for record in result.records] == [round(0.5 * CLIENTS)] * 2
    assert result.evaluate_metrics_clientapp == {}


# What is refused


@listed(
    ("options", "kind"),
    [
        ({"fraction_train": 0.0}, ValueError),
        ({"fraction_train": "0.5"}, ValueError),
        ({"fraction_evaluate": 1.5}, ValueError),
        ({"min_train_nodes": 0}, ValueError),
        ({"min_evaluate_nodes": -1}, ValueError),
        ({"min_available_nodes": 1.5}, ValueError),
        ({"arrayrecord_key": "model"}, ValueError),
        ({"configrecord_key": "fl-bn/config"}, ValueError),
        ({"weighted_by_key": ""}, ValueError),
        ({"train_metrics_aggr_fn": 3}, ValueError),
        ({"evaluate_metrics_aggr_fn": 3}, ValueError),
        ({"client_weights": "equal"}, ValueError),
        ({"clients": "3"}, ValueError),
        ({"callbacks": EarlyStop(2)}, ValueError),
        ({"optimizer": "fedadam"}, ValueError),
        ({"defence": "median"}, ValueError),
        ({"objective": "fedprox"}, ValueError),
        ({"model": torch.nn.Linear}, TypeError),
        ({"method": methods.fbn}, TypeError),
    ],
    ids=str,
)
def test_an_argument_that_cannot_work_is_refused_by_name(options: dict[str, Any], kind: type[Exception]) -> None:
    (name,) = options
    refused(lambda: OwnAppStrategy(**{"model": net(), "method": methods.fbn(), **options}), kind, name)


def started(options: dict[str, Any], **named: Any) -> Any:
    return ran(FixBN(net(), **options), own_app("fixbn"), **named)


def lacking() -> ArrayRecord:
    return ArrayRecord({name: tensor for name, tensor in net().state_dict().items() if name != "0.bias"})


def changed(**arrays: torch.Tensor) -> ArrayRecord:
    return ArrayRecord({**net().state_dict(), **{name.replace("_", ".", 1): tensor for name, tensor in arrays.items()}})


@listed(
    ("call", "kind", "word"),
    [
        *[(lambda n=n: started({}, rounds=n), ValueError, "num_rounds") for n in (-1, 2.0, "2", True)],
        *[(lambda t=t: started({}, timeout=t), ValueError, "timeout") for t in (0, "60", True)],
        *[(lambda r=r: started({"rate": lambda *_: r}), ValueError, "rate") for r in (None, "0.1", True, -0.1, float("nan"))],
        (lambda: started({"rate": 0.1}), ValueError, "rate"),
        (lambda: started({}, initial_arrays=changed(**{"0_bias": torch.zeros(9)})), ValueError, "0.bias"),
        (lambda: started({}, initial_arrays=lacking()), ValueError, "0.bias"),
        *[(lambda r=r: started({}, train_config=config(lr=r)), ValueError, "rate") for r in (-0.1, float("inf"), float("nan"))],
        *[(lambda v=v: started({}, evaluate_fn=lambda *_: v), RunFailed, "evaluate_fn") for v in ((0.5, {}), 0.5, {"acc": 1.0})],
        (lambda: started({"train_metrics_aggr_fn": lambda *_: {}}), RunFailed, "train_metrics_aggr_fn"),
        (lambda: convert(net, methods.fbn()), TypeError, "net"),
    ],
    ids=str,
)
def test_a_start_that_cannot_work_is_refused_by_name(call: Any, kind: type[Exception], word: str) -> None:
    refused(call, kind, word)


def state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    return lambda pair: (ArrayRecord(change(dict(pair[0]))), pair[1])


def without_norm(arrays: dict[str, Any]) -> Any:
    return {name: array for name, array in arrays.items() if not name.startswith("1.")}


def whole() -> torch.nn.Module:
    return apps.banked(torch.int64, "constant")


@listed(
    ("hook", "change", "word"),
    [
        ("configure_train", lambda own: [*own, Message(list(own)[0].content, 99, "train")], "1, 2, 3, 99"),
        ("configure_train", lambda own: [*own, list(own)[0]], "1, 2, 3, 1"),
        ("configure_train", lambda own: None, "configure_train"),
        ("configure_evaluate", lambda own: None, "configure_evaluate"),
        ("aggregate_train", lambda own: None, "aggregate_train"),
        ("aggregate_train", lambda own: ([np.zeros(3)], None), "aggregate_train"),
        ("aggregate_train", lambda own: (None, 0.5), "aggregate_train"),
        ("aggregate_evaluate", lambda own: (0.5, {}), "aggregate_evaluate"),
        ("aggregate_train", state(lambda arrays: {**arrays, "0.bias": Array(np.zeros(5))}), "0.bias"),
        ("aggregate_train", state(lambda arrays: {**arrays, "0.bias": Array(np.full(6, np.nan))}), "0.bias"),
        ("aggregate_train", state(lambda arrays: {**arrays, "1.running_var": Array(np.full(6, -9.0))}), "1.running_var"),
        ("aggregate_train", state(lambda arrays: {**arrays, "module.0.weight": arrays["0.weight"]}), "module.0.weight"),
        ("aggregate_train", state(without_norm), "1.weight"),
        ("aggregate_train", state(lambda arrays: {**arrays, "2.bank": Array(np.zeros((1, 6), np.float32))}), "2.bank"),
    ],
)
def test_what_a_hook_returns_that_cannot_be_is_refused_by_name(hook: str, change: Any, word: str) -> None:
    refused(lambda: ran(apps.overriding(FedAvgBN, hook, change)(whole()), own_app("fedavg", model=whole)), RunFailed, word)


def test_a_hook_that_a_secure_sum_never_calls_is_refused() -> None:
    strategy = apps.overriding(FedAvgBN, "aggregate_train")(net(), Rounds(CLIENTS), secure=SecureAggregation())
    refused(lambda: ran(strategy, own_app("fedavg")), ValueError, "aggregate_train")


# Hooks that somebody else calls

OUTSIDE: dict[str, Callable[[Strategy], Any]] = {
    "a hook": lambda strategy: strategy.configure_train(1, begin(), ConfigRecord(), grid("fedbn")),
    "another": lambda strategy: strategy.aggregate_train(1, []),
    "Flower's loop": lambda strategy: Strategy.start(strategy, grid("fedbn"), begin(), num_rounds=1),
    "noise at the server": lambda strategy: DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, CLIENTS).start(
        grid("fedbn"), begin(), num_rounds=1
    ),
    "noise at clients": lambda strategy: DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.1, CLIENTS).start(
        grid("fedbn"), begin(), num_rounds=1
    ),
}


@listed("call", OUTSIDE)
@listed("late", [False, True])
def test_hooks_that_somebody_else_calls_say_what_to_do(call: str, late: bool) -> None:
    strategy = FedBN(net())
    if late:
        ran(strategy, own_app("fedbn"))  # after a run, too
    refused(lambda: OUTSIDE[call](strategy), RunFailed, "FedBN", "strategy.start(")


def test_the_start_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec((ROOT / "docs/how-to/collisions.md").read_text().split("```python\n")[1].split("```")[0], names)
    mine, plain = (ran(kind(net()), own_app("fedbn"), rounds=2, train_config=config(lr=0.1)) for kind in (names["Mine"], FedBN))
    assert equal(mine, plain)
    assert capsys.readouterr().out.count("my_acc") == 2


# Flower's strategies with noise


# mods


# ways to start
