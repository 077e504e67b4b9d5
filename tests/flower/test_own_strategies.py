"""Strategies for apps of one's own: a subclass overrides hooks, a loop of one's own calls them, or the error says what does not work."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from ray import cloudpickle

from fl_bn import Callback, EarlyStop, convert, flower, methods
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FixBN, FixBNStrategy, InProcessGrid, OwnAppStrategy, Rounds, RunFailed
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, Scaffold
from fl_bn.secure.settings import SecureAggregation
from tests.flower import own_apps as apps
from tests.flower.own_apps import CLIENTS, OWN, begin, config, data, equal, grid, net, own_app, ran, refused, rounds, tensors
from tests.in_process import Samples, WatchedGrid, client_app
from tests.listed import listed
from tests.noted import noted

HOOKS = ("start", "summary", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


def counting(kind: type[Any]) -> type[Any]:
    """Return a user's subclass that overrides every hook, calls ``super()``, and counts."""

    def counted(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **named: Any) -> Any:
            self.calls = {**getattr(self, "calls", {}), name: getattr(self, "calls", {}).get(name, 0) + 1}
            if name.startswith("aggregate"):  # one's own code may go through the replies, and then hand them on
                assert name == "aggregate_evaluate" or len(list(args[1])) == CLIENTS
            return getattr(super(mine, self), name)(*args, **named)

        return hook

    mine = type("Mine", (kind,), {name: counted(name) for name in HOOKS} | {"__module__": "theirs"})
    return mine


def app_of_ours(method: str) -> Any:
    """Return a ClientApp of a run of fl-bn's own, over the clients' data."""
    clients = [Samples(torch.cat([x for x, _ in data(i)]), torch.cat([y for _, y in data(i)])) for i in range(CLIENTS)]
    return client_app(METHODS[method](), clients, model=net())


@listed("name", OWN)
def test_a_subclass_of_each_strategy_for_own_apps_has_each_hook_called(name: str) -> None:
    kind = OWN[name]
    mine = counting(kind)(net())
    result, expected = ran(mine, own_app(name), rounds=2), ran(kind(net()), own_app(name), rounds=2)
    assert mine.calls == {**dict.fromkeys(HOOKS, 2), "start": 1, "summary": 1}
    assert equal(result, expected)
    assert dict(result.evaluate_metrics_clientapp[2]) == dict(expected.evaluate_metrics_clientapp[2])
    assert not equal(result, ran(kind(net()), own_app(name)))  # control


@listed("name", [name for name, kind in apps.APPLICATION.items() if kind is not flower.RobustFBNStrategy])
def test_a_subclass_of_each_strategy_of_the_application_has_each_hook_called(name: str) -> None:
    kind, policy = apps.APPLICATION[name], Rounds(CLIENTS, at_clients=True, wait=1.0)
    mine = counting(kind)(net(), policy)
    result = ran(mine, app_of_ours(kind.of), rounds=2)
    assert mine.calls == {**dict.fromkeys(HOOKS, 2), "start": 1, "summary": 1}
    assert equal(result, ran(kind(net(), policy), app_of_ours(kind.of), rounds=2))


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


@listed("name", ["hbn", "fedbn"])
def test_an_app_that_was_pickled_answers_with_the_same_bits(name: str) -> None:
    """As Flower's ``run_simulation`` sends it to Ray: the functions of ``answer`` by value, with copies of all that they name."""
    app = own_app(name)
    plain, pickled = (ran(OWN[name](net()), one, rounds=2) for one in (app, cloudpickle.loads(cloudpickle.dumps(app))))
    assert equal(plain, pickled)
    assert plain.evaluate_metrics_clientapp == pickled.evaluate_metrics_clientapp
    assert not equal(plain, ran(OWN[name](net(3)), app, rounds=2))  # control


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

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            assert server_round > 1 or {getattr(self, attribute) for attribute in MINE} == {"mine"}
            self.rounds, self.model = server_round, None
            return super().aggregate_train(server_round, replies)

    mine = Mine(net())
    assert equal(ran(mine, own_app("hbn"), rounds=2), ran(HBN(net()), own_app("hbn"), rounds=2))
    assert mine.rounds == 2


def test_flower_s_arguments_that_a_subclass_sets_count_until_the_run_begins(log: pytest.LogCaptureFixture) -> None:
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
    assert log.text.count("strategy.fraction_train") == 1


def setting(kind: type[Any], name: str, *args: Any) -> Any:
    """Make an object of a user's subclass, one of whose methods sets an attribute."""
    return type("Mine", (kind,), {"__module__": "theirs", "keep": lambda self: setattr(self, name, 7)})(net(), *args).keep()


@listed(
    ("make", "kind", "name"),
    [
        (lambda: setting(FBN, "_given"), AttributeError, "_given"),
        (lambda: setting(FixBNStrategy, "rounds", Rounds(CLIENTS)), AttributeError, "rounds"),
        (lambda: type("Mine", (FBN,), {"_meet": 7, "__module__": "theirs"}), TypeError, "_meet"),
        (lambda: setting(FixBNStrategy, "best_round", Rounds(CLIENTS)), None, ""),
    ],
)
def test_a_name_of_fl_bn_is_refused_in_a_subclass(make: Any, kind: Any, name: str) -> None:
    if kind is None:
        make()  # control
    else:
        refused(make, kind, f"'{name}'")


# A loop of one's own over the hooks


def between_the_halves(strategy: Any, over: Grid) -> ArrayRecord:
    arrays = begin()
    for round in (1, 2):
        messages = strategy.configure_train(round, arrays, ConfigRecord(), over)
        asked = list(strategy.configure_evaluate(round - 1, begin(), ConfigRecord(), over))  # of other arrays
        replies = list(over.send_and_receive(messages))
        assert strategy.aggregate_evaluate(round - 1, over.send_and_receive(asked)) is not None
        arrays = strategy.aggregate_train(round, replies)[0] or arrays
    return arrays


def configured_twice(strategy: Any, over: Grid) -> ArrayRecord:
    """Its messages are the same, and a client's answer is that of its state before the round."""
    arrays = begin()
    for round in (1, 2):
        list(over.send_and_receive(strategy.configure_train(round, arrays, ConfigRecord(), over)))
        (arrays,) = rounds(strategy, over, 1, arrays, first=round)
    return arrays


def tried_again(strategy: Any, over: Grid) -> ArrayRecord:
    list(over.send_and_receive(strategy.configure_train(1, begin(), ConfigRecord(), over)))
    assert strategy.aggregate_train(1, []) == (None, None)
    return [*rounds(strategy, over, 2)][-1]


def after_a_start(strategy: Any, over: Grid) -> ArrayRecord:
    """The server optimiser's memory of the run before is no part of the loop."""
    strategy.start(over, begin(), num_rounds=1)
    return [*rounds(strategy, over, 2)][-1]


ORDERS = {between_the_halves: "hbn", configured_twice: "fedbn", tried_again: "fbn", after_a_start: "fedavg"}


@listed(("loop", "name"), ORDERS.items())
def test_hooks_in_another_order_have_the_bits_of_start(loop: Any, name: str) -> None:
    options: Any = {} if name != "fedavg" else {"optimizer": server_optimizer("fedavgm")}
    expected = OWN[name](net(), **options).start(grid(name), begin(), num_rounds=2)
    assert equal(loop(OWN[name](net(), **options), grid(name)), expected)


class Wrapper(Strategy):
    """Hands the hooks on."""

    def __init__(self, inner: Strategy) -> None:
        self.strategy = inner
        for hook in HOOKS[1:]:
            setattr(self, hook, getattr(inner, hook))

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = summary = None


SHARE = {"fraction_train": 0.5, "fraction_evaluate": 0.5, "min_evaluate_nodes": 1}


@listed(("name", "options"), [("fedavg", SHARE), ("fixbn", {"num_rounds": 3}), ("fedbn", SHARE), ("hbn", {"fraction_evaluate": 0.0})])
def test_flower_s_own_start_over_the_hooks_has_the_bits_of_start(name: str, options: dict[str, Any]) -> None:
    """A wrapper of one's own hands the hooks on."""
    strategy, other = (OWN[name](net(), **options) for _ in range(2))
    expected = strategy.start(grid(name), begin(), num_rounds=3, train_config=config(lr=0.1))
    by_round: dict[int, ArrayRecord] = {}
    result = Wrapper(Wrapper(other)).start(grid(name), begin(), 3, train_config=config(lr=0.1), evaluate_fn=by_round.__setitem__)
    assert equal(result, expected)
    assert not equal(by_round[2], expected)  # control
    assert result.train_metrics_clientapp == expected.train_metrics_clientapp
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    for mine, theirs in zip(other.round_records, expected.records, strict=True):
        assert all(getattr(mine, field) == getattr(theirs, field) for field in ("phase", "learning_rate", "bytes_up", "own_metrics"))


def test_each_round_of_a_loop_has_the_phase_and_the_rate_of_its_number() -> None:
    """A new config for each round, not a hook's change of one. Numbers may be skipped."""
    strategy, over, arrays = FixBN(net(), freeze_after=2, frozen_rate=0.1), WatchedGrid(own_app("fixbn"), CLIENTS), begin()
    for round, rate in ((1, 0.1), (2, 0.05), (4, 0.04)):
        replies = over.send_and_receive(strategy.configure_train(round, arrays, config(lr=rate), over))
        before, arrays = arrays, strategy.aggregate_train(round, replies)[0]
    assert [(record.round, record.phase) for record in strategy.round_records] == [(1, "train"), (2, "train"), (4, "frozen")]
    assert [record.learning_rate for record in strategy.round_records] == pytest.approx([0.1, 0.05, 0.01])
    assert [apps.lr(m) for m in over.sent if m.metadata.message_type == "train"][::CLIENTS] == pytest.approx([0.1, 0.05, 0.01])
    same = [name for name, tensor in tensors(arrays).items() if torch.equal(tensor, tensors(before)[name])]
    assert {"1.running_mean", "1.running_var"} <= {*same}
    assert "0.weight" not in same


def test_a_loop_may_go_on_at_a_later_round() -> None:
    """After a checkpoint of one's own, in a new process. FedAvg's clients keep nothing, so the bits are the same."""
    _, second, third = rounds(FedAvgBN(net(), fraction_evaluate=0), grid("fedavg"), 3)
    (again,) = rounds(FedAvgBN(net(), fraction_evaluate=0), grid("fedavg"), 1, second, first=3)
    apart = [name for name, tensor in tensors(again).items() if not torch.equal(tensor, tensors(third)[name])]
    assert apart in ([], ["1.num_batches_tracked"])
    assert not torch.equal(tensors(second)["0.weight"], tensors(third)["0.weight"])  # control


def test_who_does_not_reply_or_was_not_asked_is_no_part_of_the_round() -> None:
    for asked, used, least, samples in ((3, 3, 2, 48), (3, 2, 2, 32), (3, 1, 2, 0), (1, 1, 1, 16)):  # one of three is too few
        strategy, over = FedAvgBN(net(), min_train_nodes=least), grid("fedavg")
        replies = list(over.send_and_receive(list(strategy.configure_train(1, begin(), ConfigRecord(), over))[:asked]))
        _, metrics = strategy.aggregate_train(1, replies[:used])
        assert (metrics or {"samples": 0})["samples"] == samples
        assert [client.client for client in strategy.round_records[0].clients] == [*range(asked)] or used < asked


@listed("tells", [True, False])
def test_a_loop_s_own_evaluation_of_what_stays_at_home(tells: bool) -> None:
    """The global model is the one that ``evaluate_fn`` of ``start`` gets."""
    strategy, expected = FedBN(net(), fraction_evaluate=0), dict[int, ArrayRecord]()
    FedBN(net(), fraction_evaluate=0).start(grid("fedbn", tells=tells), begin(), num_rounds=1, evaluate_fn=expected.__setitem__)
    (arrays,) = rounds(strategy, grid("fedbn", tells=tells), 1)
    whole = strategy.global_model(1, arrays)
    assert equal(whole, expected[1]) if tells else whole is None


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
        ({"ranges": {"acc": 100}}, ValueError),
        ({"num_rounds": -1}, ValueError),
        ({"callbacks": EarlyStop(2)}, ValueError),
        ({"optimizer": "fedadam"}, TypeError),
        ({"defence": "median"}, TypeError),
        ({"objective": "fedprox"}, TypeError),
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
        *[(lambda t=t: started({}, timeout=t), ValueError, "timeout") for t in (None, 0, "60")],
        *[(lambda r=r: started({"rate": lambda *_: r}), ValueError, "rate") for r in (None, "0.1", True, -0.1, float("nan"))],
        (lambda: started({"rate": 0.1}), ValueError, "rate"),
        (lambda: started({}, initial_arrays=changed(**{"0_bias": torch.zeros(9)})), ValueError, "0.bias"),
        (lambda: started({}, initial_arrays=lacking()), ValueError, "0.bias"),
        *[(lambda r=r: started({}, train_config=config(lr=r)), RunFailed, "lr") for r in (-0.1, float("inf"), float("nan"))],
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
        ("configure_train", lambda own: [*own, Message(list(own)[0].content, 99, "train")], "node 99"),
        ("configure_train", lambda own: [*own, list(own)[0]], "node 1"),
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
    strategy = counting(flower.FedAvgBNStrategy)(net(), Rounds(CLIENTS), secure=SecureAggregation())
    refused(lambda: ran(strategy, own_app("fedavg")), ValueError, "aggregate_train")


@functools.cache
def two_rounds() -> Any:
    return FedAvgBN(net()).start(grid("fedavg"), begin(), num_rounds=2)


@listed(
    ("call", "word"),
    [
        (lambda s, g, a: FedBN(net()).aggregate_train(1, []), "configure_train"),
        (lambda s, g, a: FedBN(net()).aggregate_evaluate(1, []), "configure_evaluate"),
        (lambda s, g, a: FedBN(net()).global_model(1, begin()), "configure_train"),
        (lambda s, g, a: s.aggregate_train(2, []), "configure_train(2"),
        (lambda s, g, a: s.aggregate_train(1, []), "round 1"),
        (lambda s, g, a: s.configure_train(1, a, ConfigRecord(), g), "round 1"),
        (lambda s, g, a: s.configure_train(0, a, ConfigRecord(), g), "numbered"),
        (lambda s, g, a: s.configure_train(5, a, ConfigRecord(), g), "num_rounds=4"),
        (lambda s, g, a: s.aggregate_evaluate(1, []), "configure_evaluate"),
        (lambda s, g, a: s.configure_train(2, ArrayRecord({"x": torch.ones(2)}), ConfigRecord(), g), "arrays"),
        (lambda s, g, a: s.configure_train(2, changed(**{"1_running_var": torch.full((6,), -9.0)}), ConfigRecord(), g), "1.running_var"),
        (lambda s, g, a: Strategy.start(flower.FedTAN(net()), grid("fedtan"), begin(), num_rounds=1), "FedTAN"),
        (lambda s, g, a: Strategy.start(FedBN(net(), callbacks=[Callback()]), grid("fedbn"), begin(), num_rounds=1), "callbacks"),
        (lambda s, g, a: Strategy.start(FixBN(net()), grid("fixbn"), begin(), num_rounds=4), "num_rounds"),
        (lambda s, g, a: Strategy.start(FedBN(net(), rate=lambda *_: 0.1), grid("fedbn"), begin(), num_rounds=4), "number of rounds"),
    ],
)
def test_calls_of_a_loop_that_make_no_sense_are_refused(call: Any, word: str) -> None:
    strategy, over = FedAvgBN(net(), num_rounds=4), grid("fedavg")
    (arrays,) = rounds(strategy, over, 1)
    refused(lambda: call(strategy, over, arrays), RunFailed, word)
    (second,) = rounds(strategy, over, 1, arrays, first=2)
    assert equal(second, two_rounds())  # it goes on
