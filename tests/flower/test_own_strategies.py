"""Strategies are classes: a subclass of each one overrides each hook, which is called; ``super()`` works, and changes no number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy
from ray import cloudpickle
from torch import Tensor

from fl_bn.federation.local import Samples
from fl_bn.flower import (
    FBN,
    HBN,
    BatchNormStrategy,
    FBNStrategy,
    FedAvgAlg2Strategy,
    FedAvgBN,
    FedAvgBNStrategy,
    FedBN,
    FedBNStrategy,
    FedTAN,
    FedTAN2,
    FedTAN2Strategy,
    FedTANStrategy,
    FixBN,
    FixBNStrategy,
    HBNStrategy,
    InProcessGrid,
    OwnAppStrategy,
    RobustFBNStrategy,
    Rounds,
    RunFailed,
    SiloBN,
    SiloBNStrategy,
)
from fl_bn.flower.own.rates import RATES
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from tests.flower.own_apps import CLIENTS, config, data, net, own_app
from tests.in_process import client_app
from tests.listed import listed
from tests.noted import noted

HOOKS = ("start", "summary", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
OWN: dict[str, type[OwnAppStrategy]] = {
    "fedavg": FedAvgBN,
    "fixbn": FixBN,
    "fedbn": FedBN,
    "silobn": SiloBN,
    "hbn": HBN,
    "fbn": FBN,
    "fedtan": FedTAN,
    "fedtan2": FedTAN2,
}
OURS: dict[str, type[BatchNormStrategy]] = {
    "fedavg": FedAvgBNStrategy,
    "fixbn": FixBNStrategy,
    "fedbn": FedBNStrategy,
    "silobn": SiloBNStrategy,
    "hbn": HBNStrategy,
    "fbn": FBNStrategy,
    "fedtan": FedTANStrategy,
    "fedtan2": FedTAN2Strategy,
    "fedavg-alg2": FedAvgAlg2Strategy,
}


def counting(kind: type[Any]) -> type[Any]:
    """A user's subclass that overrides every hook, calls ``super()``, and counts."""

    class Mine(kind):  # type: ignore[misc]
        def start(self, *args: Any, **options: Any) -> Any:
            self.calls = {**dict.fromkeys(HOOKS, 0), "start": 1}
            return super().start(*args, **options)

        def summary(self) -> None:
            self.calls["summary"] += 1
            super().summary()

        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Iterable[Message]:
            self.calls["configure_train"] += 1
            assert "0.weight" in arrays
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
            self.calls["aggregate_train"] += 1
            assert len(list(replies)) == CLIENTS  # one's own code may go through them, and then hand them on
            return super().aggregate_train(server_round, replies)

        def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Iterable[Message]:
            self.calls["configure_evaluate"] += 1
            return super().configure_evaluate(server_round, arrays, config, grid)

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
            self.calls["aggregate_evaluate"] += 1
            list(replies)
            return super().aggregate_evaluate(server_round, replies)

    return Mine


def ran(strategy: Any, app: Any, rounds: int = 2) -> tuple[dict[str, Tensor], Any]:
    result = strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds)
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in result.arrays.items()}, result


def app_of_ours(method: str) -> Any:
    """A ClientApp of a run of fl-bn's own, over the clients' data."""
    clients = [Samples(torch.cat([x for x, _ in data(i)]), torch.cat([y for _, y in data(i)])) for i in range(CLIENTS)]
    return client_app(METHODS[method](), clients, model=net())


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@listed("name", OWN)
def test_a_subclass_of_each_strategy_for_own_apps_has_each_hook_called(name: str) -> None:
    kind = OWN[name]
    assert issubclass(kind, Strategy)
    assert issubclass(kind, OwnAppStrategy)
    mine = counting(kind)(net())
    tensors, result = ran(mine, own_app(name))
    assert mine.calls == {**dict.fromkeys(HOOKS, 2), "start": 1, "summary": 1}
    plain, expected = ran(kind(net()), own_app(name))
    assert equal(tensors, plain)
    assert dict(result.evaluate_metrics_clientapp[2]) == dict(expected.evaluate_metrics_clientapp[2])
    assert not equal(tensors, ran(kind(net()), own_app(name), rounds=1)[0])  # control


@listed("name", OURS)
def test_a_subclass_of_each_strategy_of_the_application_has_each_hook_called(name: str) -> None:
    policy = Rounds(CLIENTS, at_clients=True, wait=1.0)
    mine = counting(OURS[name])(net(), policy)
    tensors, _ = ran(mine, app_of_ours(name))
    assert mine.calls == {**dict.fromkeys(HOOKS, 2), "start": 1, "summary": 1}
    assert equal(tensors, ran(OURS[name](net(), policy), app_of_ours(name))[0])


def test_the_robust_strategy_is_a_class_too() -> None:
    assert issubclass(counting(RobustFBNStrategy), BatchNormStrategy)


def test_a_rate_that_a_hook_halves_is_halved_at_the_clients_and_in_the_records() -> None:
    """As Flower's advanced-pytorch does, in ``configure_train``."""
    rates: list[float] = []

    class Halves(FixBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            if server_round % 2 == 0:
                config["lr"] *= 0.5
            return super().configure_train(server_round, arrays, config, grid)

    def rate(message: Message) -> float:
        rates.append(float(message.content["config"]["lr"]))  # type: ignore[arg-type,call-overload,index]
        return rates[-1]

    app = own_app("fixbn", rate=rate)
    strategy = Halves(net(), freeze_after=3, frozen_rate=0.1, fraction_evaluate=0)
    result = strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=4, train_config=config(lr=0.1))
    assert rates[::CLIENTS] == pytest.approx([0.1, 0.05, 0.05, 0.01])  # round 4 is frozen: no more than .1 of the rate before
    assert [record.learning_rate for record in result.records] == pytest.approx([0.1, 0.05, 0.05, 0.01])


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("last", [0.0, 0, 0.05])
def test_a_rate_of_0_is_a_rate(name: str, last: float) -> None:
    """It is the round's rate at clients and in the records, and FBN's statistics rest with the weights."""
    seen: list[float] = []

    class Falls(FBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            if server_round == 3:
                config[name] = last
            return super().configure_train(server_round, arrays, config, grid)

    def rate(message: Message) -> float:
        seen.append(float(message.content["config"][name]))  # type: ignore[arg-type,call-overload,index]
        return seen[-1]

    strategy = Falls(net(), fraction_evaluate=0)
    found = noted(strategy)
    result = strategy.start(InProcessGrid(own_app("fbn", rate=rate), CLIENTS, {}), num_rounds=3, train_config=ConfigRecord({name: 0.1}))
    assert [record.learning_rate for record in result.records] == seen[::CLIENTS] == [0.1, 0.1, last]
    rests = all(np.array_equal(found[2][key], found[3][key]) for key in found[3])
    assert rests == (not last)  # control: at another rate, they move
    assert not np.array_equal(found[1]["1.running_mean"], found[2]["1.running_mean"])


@pytest.mark.parametrize("wrong", [-0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("round", [1, 2])
def test_a_rate_that_is_none_is_refused(wrong: float, round: int) -> None:
    class Wrong(FixBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            if server_round == round:
                config["lr"] = wrong
            return super().configure_train(server_round, arrays, config, grid)

    with pytest.raises(RunFailed, match=r"lr in the train config must be a finite number >= 0 \(the learning rate\), but is "):
        ran(Wrong(net()), own_app("fixbn"))


@pytest.mark.parametrize("wrong", [None, "0.1", True, -0.1, float("nan"), float("inf")], ids=str)
def test_so_is_one_of_the_argument_rate(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"rate must return a finite number >= 0 .*, but for round 1 of 2 returned "):
        ran(FBN(net(), rate=lambda round, rounds: wrong, num_rounds=2), own_app("fbn"))
    with pytest.raises(ValueError, match="rate must be a function"):
        ran(FBN(net(), rate=0.1, num_rounds=2), own_app("fbn"))


def test_a_hook_may_leave_clients_out_and_change_what_is_aggregated() -> None:
    class Mine(FedAvgBN):
        def configure_train(self, *args: Any) -> Any:
            return list(super().configure_train(*args))[1:]

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            state = arrays.to_torch_state_dict()
            state["0.bias"] = torch.full_like(state["0.bias"], 3.0)
            return ArrayRecord(state), MetricRecord({**metrics, "mine": 1.0})

    tensors, result = ran(Mine(net(), fraction_evaluate=0), own_app("fedavg"))
    assert [[c.client for c in record.clients] for record in result.records] == [[1, 2]] * 2
    assert torch.equal(tensors["0.bias"], torch.full((6,), 3.0))
    assert result.train_metrics_clientapp[2]["mine"] == 1.0


def test_a_hook_that_aggregates_by_itself_needs_no_super() -> None:
    class First(FedAvgBN):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            (first, *_) = replies
            own = {**first.content["fl-bn/weights"], **first.content["fl-bn/statistics"]}
            return ArrayRecord(own), None

    tensors, result = ran(First(net(), fraction_evaluate=0), own_app("fedavg"))
    assert all(record.aggregated for record in result.records)
    assert not torch.equal(tensors["0.weight"], net()[0].weight)


def test_a_hook_that_sends_nothing_trains_nobody() -> None:
    class Rests(FedAvgBN):
        def configure_train(self, server_round: int, *args: Any) -> Any:
            return [] if server_round > 1 else super().configure_train(server_round, *args)

    _, result = ran(Rests(net(), fraction_evaluate=0), own_app("fedavg"), rounds=6)
    assert [record.aggregated for record in result.records] == [True] + [False] * 5


WRONG: dict[str, tuple[Any, str]] = {
    "a stranger": (lambda own: [*own, Message(own[0].content, 99, "train")], "configure_train returned a message for node 99, which is"),
    "twice": (lambda own: [*own, own[0]], "configure_train returned 2 messages for node 1: return one per client"),
}


@listed("case", WRONG)
def test_messages_of_a_hook_for_nobody_are_refused(case: str) -> None:
    change, says = WRONG[case]

    class Mine(FedAvgBN):
        def configure_train(self, *args: Any) -> Any:
            return change(list(super().configure_train(*args)))

    with pytest.raises(RunFailed, match=says):
        ran(Mine(net()), own_app("fedavg"))


def test_arrays_of_a_hook_that_do_not_fit_are_refused() -> None:
    class Mine(FedAvgBN):
        def aggregate_train(self, *args: Any) -> Any:
            arrays, metrics = super().aggregate_train(*args)
            return ArrayRecord({**arrays.to_torch_state_dict(), "0.bias": torch.zeros(5)}), metrics

    with pytest.raises(RunFailed, match=r"a hook gave 0.bias with shape \(5,\), but the network has \(6,\)"):
        ran(Mine(net()), own_app("fedavg"))


def test_a_hook_that_a_secure_sum_never_calls_is_refused() -> None:
    strategy = counting(FedAvgBNStrategy)(net(), Rounds(CLIENTS), secure=SecureAggregation())
    with pytest.raises(ValueError, match="Mine overrides aggregate_train, but with secure aggregation the server sees no client's reply"):
        strategy.start(InProcessGrid(own_app("fedavg"), CLIENTS, {}))


@listed("name", ["hbn", "fedbn"])
def test_an_app_that_was_pickled_answers_with_the_same_bits(name: str) -> None:
    """As Flower's ``run_simulation`` sends it to Ray: the functions of ``answer`` by value, with copies of all that they name."""
    app = own_app(name)
    tensors, result = ran(OWN[name](net()), app)
    pickled, other = ran(OWN[name](net()), cloudpickle.loads(cloudpickle.dumps(app)))
    assert equal(tensors, pickled)
    assert result.evaluate_metrics_clientapp == other.evaluate_metrics_clientapp
    assert not equal(tensors, ran(OWN[name](net(3)), app)[0])  # control


MINE = ("model", "rounds", "method", "rate", "seed", "clients", "optimizer", "defence", "callbacks", "payload", "exchange", "flower")


@listed("name", ["fedavg", "fixbn", "hbn", "fedbn"])
def test_attributes_of_a_subclass_replace_nothing_of_fl_bn(name: str) -> None:
    """Ordinary names: a user's strategy counts its ``rounds``, and keeps its best ``model``."""

    class Mine(OWN[name]):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for attribute in MINE:
                setattr(self, attribute, "mine")

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            assert server_round > 1 or {getattr(self, attribute) for attribute in MINE} == {"mine"}
            self.rounds, self.model = server_round, None
            return super().aggregate_train(server_round, replies)

    mine = Mine(net())
    tensors, _ = ran(mine, own_app(name))
    assert mine.rounds == 2
    assert equal(tensors, ran(OWN[name](net()), own_app(name))[0])


def test_flowers_arguments_that_a_subclass_sets_later_count() -> None:
    class Mine(FedAvgBN):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.fraction_train, self.fraction_evaluate = 0.5, 0.0

    _, result = ran(Mine(net(), min_train_nodes=1), own_app("fedavg"))
    assert [len(record.clients) for record in result.records] == [round(0.5 * CLIENTS)] * 2
    assert result.evaluate_metrics_clientapp == {}
    wrong = FedAvgBN(net())
    wrong.fraction_evaluate = 1.5
    with pytest.raises(ValueError, match="fraction_evaluate must be 0"):
        ran(wrong, own_app("fedavg"))


@pytest.mark.parametrize("name", ["_rounds", "_given", "_loop"])
@pytest.mark.parametrize("first", [True, False], ids=["before super().__init__", "after"])
def test_a_private_name_of_fl_bn_is_refused_in_a_subclass(name: str, first: bool) -> None:
    class Mine(FBN):
        def __init__(self, *args: Any, **options: Any) -> None:
            if first:
                setattr(self, name, 7)
            super().__init__(*args, **options)
            setattr(self, name, 7)

    with pytest.raises(AttributeError, match=f"Mine sets the attribute '{name}', which FBN of fl-bn uses for itself: choose another name"):
        Mine(net())
    with pytest.raises(TypeError, match="Mine2 defines '_meet', which FBN of fl-bn uses for itself"):
        type("Mine2", (FBN,), {"_meet": 7, "__module__": "theirs"})


@pytest.mark.parametrize("name", ["server", "cohort", "sent", "rounds", "callbacks", "population"])
def test_a_subclass_of_a_strategy_for_runs_that_uses_its_names_is_refused(name: str) -> None:
    class Late(FixBNStrategy):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            setattr(self, name, [])
            return super().aggregate_train(server_round, replies)

    class Mine(FixBNStrategy):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.best, self.best_round = 0.0, 0

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.best_round = server_round
            return super().aggregate_train(server_round, replies)

    wanted = f"Late sets the attribute '{name}', which FixBNStrategy of fl-bn uses for itself: choose another name"
    grid = InProcessGrid(app_of_ours("fixbn"), CLIENTS, {})
    with pytest.raises(AttributeError, match=wanted):
        Late(net(), Rounds(CLIENTS)).start(grid, num_rounds=1)
    with pytest.raises(TypeError, match="Mine2 defines 'everyone', which FBNStrategy of fl-bn uses for itself"):
        type("Mine2", (FBNStrategy,), {"everyone": 7, "__module__": "theirs"})
    mine = Mine(net(), Rounds(CLIENTS))
    mine.start(InProcessGrid(app_of_ours("fixbn"), CLIENTS, {}), num_rounds=1)
    assert mine.best_round == 1
