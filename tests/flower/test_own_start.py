"""A ``start`` of one's own calls the hooks itself, as Flower's does: the same bits as fl-bn's ``start``, in any order that makes sense."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch.nn import functional as F

from fl_bn import Callback
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, FedTAN, FedTAN2, FixBN, InProcessGrid, OwnAppStrategy, RunFailed, answer, training
from fl_bn.methods import METHODS
from fl_bn.objectives import PLAIN, Scaffold
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, config, data, net, own_app
from tests.flower.own_loops import OWN, OtherGrid, begin, equal, grid, rounds
from tests.in_process import WatchedGrid
from tests.listed import listed

# the same bits as ``start``


SHARES: dict[str, dict[str, Any]] = {
    "all": {},
    "a share": {"fraction_train": 0.5, "fraction_evaluate": 0.5, "min_evaluate_nodes": 1},
    "nobody evaluates": {"fraction_evaluate": 0.0},
}


@listed(("name", "share"), [*((name, "a share") for name in OWN), ("fedavg", "all"), ("hbn", "all"), ("fbn", "nobody evaluates")])
def test_flower_s_own_start_over_the_hooks_has_the_bits_of_start(name: str, share: str) -> None:
    kind, options = OWN[name]
    strategy, other = kind(net(), **options, **SHARES[share]), kind(net(), **options, **SHARES[share])
    expected = strategy.start(grid(name), begin(), num_rounds=3, train_config=config(lr=0.1))
    by_round: dict[int, ArrayRecord] = {}
    result = Strategy.start(other, grid(name), begin(), 3, train_config=config(lr=0.1), evaluate_fn=by_round.__setitem__)
    assert equal(result.arrays, expected.arrays)
    assert not equal(by_round[2], expected.arrays)  # control
    assert result.train_metrics_clientapp == expected.train_metrics_clientapp
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
    assert len(expected.evaluate_metrics_clientapp) == (0 if share == "nobody evaluates" else 3)
    fields = ("round", "phase", "learning_rate", "evaluation", "client_evaluation", "own_metrics", "bytes_up", "bytes_down", "disclosures")
    for mine, theirs in zip(other.round_records, expected.records, strict=True):
        assert {field: getattr(mine, field) for field in fields} == {field: getattr(theirs, field) for field in fields}


def test_an_optimiser_of_the_server_keeps_its_memory() -> None:
    strategy, other = (FedAvgBN(net(), fraction_evaluate=0, optimizer=server_optimizer("fedadam")) for _ in range(2))
    expected = strategy.start(grid("fedavg"), begin(), num_rounds=3).arrays
    assert equal(Strategy.start(other, grid("fedavg"), begin(), num_rounds=3).arrays, expected)
    assert not equal(
        Strategy.start(FedAvgBN(net(), fraction_evaluate=0), grid("fedavg"), begin(), num_rounds=3).arrays, expected
    )  # control


def test_a_second_start_begins_without_that_memory() -> None:
    strategy = FedAvgBN(net(), fraction_evaluate=0, optimizer=server_optimizer("fedavgm"))
    one, two = (strategy.start(grid("fedavg"), begin(), num_rounds=2).arrays for _ in range(2))
    assert equal(one, two)
    assert not equal(FedAvgBN(net(), fraction_evaluate=0).start(grid("fedavg"), begin(), num_rounds=2).arrays, one)  # control


def test_any_grid_carries_it() -> None:
    result = Strategy.start(HBN(net()), OtherGrid(grid("hbn")), begin(), num_rounds=2)
    assert equal(result.arrays, HBN(net()).start(grid("hbn"), begin(), num_rounds=2).arrays)


def test_a_rate_that_the_loop_changes_per_round_is_the_round_s() -> None:
    """A new config for each round, not a hook's change of one."""
    strategy, over, arrays = (
        FixBN(net(), freeze_after=3, frozen_rate=0.1, fraction_evaluate=0),
        WatchedGrid(own_app("fixbn"), CLIENTS),
        begin(),
    )
    for round, rate in enumerate((0.1, 0.05, 0.04, 0.04), 1):
        replies = over.send_and_receive(strategy.configure_train(round, arrays, config(lr=rate), over))
        arrays = strategy.aggregate_train(round, replies)[0] or arrays
    assert [record.learning_rate for record in strategy.round_records] == pytest.approx([0.1, 0.05, 0.04, 0.01])
    sent = [float(str(m.content.config_records["config"]["lr"])) for m in over.sent if m.metadata.message_type == "train"]
    assert sent[::CLIENTS] == pytest.approx([0.1, 0.05, 0.04, 0.01])


class Mine(FedBN):
    """As Flower's advanced-pytorch: its own loop, a schedule, a checkpoint of the best, a tracker, a stop."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        if server_round > 1:
            config["lr"] = float(config["lr"]) / 2  # type: ignore[arg-type]
        return super().configure_train(server_round, arrays, config, grid)

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_fn: Callable[..., Any],
        log: Any,
    ) -> Result:
        result, arrays, best = Result(), initial_arrays, -1.0
        result.evaluate_metrics_serverapp[0] = evaluate_fn(0, arrays)
        for current in range(1, num_rounds + 1):
            replies = grid.send_and_receive(messages=self.configure_train(current, arrays, train_config, grid), timeout=9.0)
            replies = [reply for reply in replies if not reply.has_error()]
            new, metrics = self.aggregate_train(current, replies)
            if new is not None and metrics is not None:
                result.arrays = arrays = new
                log({"round": current, **dict(metrics)})
            replies = grid.send_and_receive(messages=self.configure_evaluate(current, arrays, ConfigRecord(), grid), timeout=9.0)
            evaluated = self.aggregate_evaluate(current, replies)
            assert evaluated is not None
            result.evaluate_metrics_clientapp[current] = evaluated
            whole = self.global_model(current, arrays)
            assert whole is not None
            central = result.evaluate_metrics_serverapp[current] = evaluate_fn(current, whole)
            if central["acc"] > best:
                best, self.best = central["acc"], whole.to_torch_state_dict()
            if current == 3:
                break
        return result


def test_a_start_of_one_s_own_with_schedule_checkpoint_tracker_and_early_stop() -> None:
    told: list[dict[str, Any]] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model = net(3)
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        return MetricRecord(
            {
                "acc": float(round),
                "size": float(model.state_dict()["0.weight"].norm()),
                "var": float(model.state_dict()["1.running_var"].mean()),
            }
        )

    strategy = Mine(net())
    result = strategy.start(grid("fedbn", tells=True), begin(), 9, config(lr=0.1), evaluate, told.append)
    assert [one["round"] for one in told] == [1, 2, 3]
    assert told[0]["my_acc"] == pytest.approx(0.2)
    assert [record.learning_rate for record in strategy.round_records] == pytest.approx([0.1, 0.05, 0.025])
    expected: dict[int, Any] = {}

    class Halves(FedBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            if server_round > 1:
                config["lr"] /= 2
            return super().configure_train(server_round, arrays, config, grid)

    plain = Halves(net()).start(
        grid("fedbn", tells=True), begin(), 3, train_config=config(lr=0.1), evaluate_fn=lambda r, a: expected.setdefault(r, evaluate(r, a))
    )
    assert equal(result.arrays, plain.arrays)
    assert result.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert result.evaluate_metrics_serverapp == expected
    net().load_state_dict(strategy.best, strict=True)
    assert int(strategy.best["1.num_batches_tracked"]) == 3 * 2  # three rounds of two batches


# replies and messages that the loop leaves out


def test_replies_that_failed_may_be_left_out_by_the_loop() -> None:
    def fails(message: Message, context: Any) -> None:
        if int(context.node_config["partition-id"]) == 2 and message.metadata.message_type == "train":
            raise ValueError("no data")

    results = []
    for skips in (True, False):
        strategy, over = FedBN(net()), grid("fedbn", before=fails)
        replies = list(over.send_and_receive(strategy.configure_train(1, begin(), ConfigRecord(), over)))
        arrays, metrics = strategy.aggregate_train(1, [r for r in replies if not (skips and r.has_error())])
        assert metrics is not None
        assert metrics["samples"] == 32
        results.append(arrays)
    expected = FedBN(net(), fraction_evaluate=0).start(grid("fedbn", before=fails), begin(), num_rounds=1)
    assert all(arrays is not None and equal(arrays, expected.arrays) for arrays in results)


def test_clients_whose_message_the_loop_did_not_send_are_no_part_of_the_round() -> None:
    strategy, over = FedAvgBN(net(), min_train_nodes=1), grid("fedavg")
    messages = list(strategy.configure_train(1, begin(), ConfigRecord(), over))
    arrays, _ = strategy.aggregate_train(1, over.send_and_receive(messages[:1]))
    assert arrays is not None  # one of three would be too few
    assert [client.client for client in strategy.round_records[0].clients] == [0]


def test_too_few_replies_give_nothing() -> None:
    strategy, over = FedAvgBN(net()), grid("fedavg")
    replies = list(over.send_and_receive(strategy.configure_train(1, begin(), ConfigRecord(), over)))
    assert strategy.aggregate_train(1, replies[:1]) == (None, None)


# what a loop of one's own cannot have


def test_what_the_hooks_alone_cannot_do_is_refused_in_one_sentence() -> None:
    for kind, name in ((FedTAN, "fedtan"), (FedTAN2, "fedtan2")):
        with pytest.raises(
            RunFailed, match=rf"^{kind.__name__}'s clients exchange statistics within a round, and only start\(\.\.\.\) runs such .*super"
        ):
            Strategy.start(kind(net()), grid(name), begin(), num_rounds=1)
    with pytest.raises(RunFailed, match=r"^FedBN has callbacks, which only start\(\.\.\.\) calls: .*super\(\).start"):
        Strategy.start(FedBN(net(), callbacks=[Callback()]), grid("fedbn"), begin(), num_rounds=1)


def test_the_number_of_rounds_is_asked_for_where_something_depends_on_it() -> None:
    with pytest.raises(
        RunFailed,
        match=r"^fixbn freezes after half of the rounds, but your loop's number of rounds is unknown: give FixBN\(..., num_rounds=20\)",
    ):
        Strategy.start(FixBN(net()), grid("fixbn"), begin(), num_rounds=4)
    with pytest.raises(
        RunFailed, match=r"^the learning rate is a function of \(round, rounds\), but your loop's number of rounds is unknown"
    ):
        Strategy.start(FedBN(net(), rate=lambda round, rounds: 0.1), grid("fedbn"), begin(), num_rounds=4)
    strategy = FixBN(net(), num_rounds=4, fraction_evaluate=0)
    result = Strategy.start(strategy, grid("fixbn"), begin(), num_rounds=4)
    assert equal(result.arrays, FixBN(net(), fraction_evaluate=0).start(grid("fixbn"), begin(), num_rounds=4).arrays)
    assert [record.phase for record in strategy.round_records] == ["train", "train", "frozen", "frozen"]
    with pytest.raises(RunFailed, match=r"configure_train\(5, ...\): the strategy has num_rounds=4: set it to your loop's number"):
        strategy.configure_train(5, result.arrays, ConfigRecord(), grid("fixbn"))
    with pytest.raises(ValueError, match="num_rounds must be the number of rounds of your own loop, or 0"):
        FixBN(net(), num_rounds=-1)


def test_a_loop_after_start_and_a_start_after_a_loop_are_runs_of_their_own() -> None:
    strategy = HBN(net(), fraction_evaluate=0)
    one = strategy.start(grid("hbn"), begin(), num_rounds=2).arrays
    *_, two = rounds(strategy, grid("hbn"), 2)
    assert equal(one, two)
    assert len(strategy.round_records) == 2
    assert equal(strategy.start(grid("hbn"), begin(), num_rounds=2).arrays, one)
    assert strategy.round_records == []


def test_a_wrapper_of_one_s_own_hands_the_hooks_on() -> None:
    class Wrapper(Strategy):
        def __init__(self, inner: Strategy) -> None:
            self.strategy = inner

        def configure_train(self, *args: Any) -> Any:
            return self.strategy.configure_train(*args)

        def aggregate_train(self, *args: Any) -> Any:
            return self.strategy.aggregate_train(*args)

        def configure_evaluate(self, *args: Any) -> Any:
            return self.strategy.configure_evaluate(*args)

        def aggregate_evaluate(self, *args: Any) -> Any:
            return self.strategy.aggregate_evaluate(*args)

        def summary(self) -> None:
            self.strategy.summary()

    result = Wrapper(Wrapper(FedBN(net()))).start(grid("fedbn"), begin(), num_rounds=2)
    assert equal(result.arrays, FedBN(net()).start(grid("fedbn"), begin(), num_rounds=2).arrays)


def test_the_message_of_a_loop_has_the_user_s_config_and_the_round() -> None:
    over, strategy = WatchedGrid(own_app("fedavg"), CLIENTS), FedAvgBN(net(), configrecord_key="mine")
    message = list(strategy.configure_train(1, begin(), config(epochs=3), over))[0]
    assert dict(message.content.config_records["mine"]) == {"epochs": 3, "server-round": 1}


def test_what_the_arrays_of_a_loop_lack_is_said_once(log: pytest.LogCaptureFixture) -> None:
    list(rounds(FedBN(net(), fraction_evaluate=0), grid("fedbn"), 2))
    says = "under fedbn the arrays of aggregate_train lack the tensors that clients keep (1.bias, ...: 5 tensors): strategy.global_model("
    assert log.text.count(says) == 1
    log.clear()
    list(rounds(FBN(net(), fraction_evaluate=0), grid("fbn"), 1))
    assert "lack the tensors that clients keep" not in log.text  # control


def test_there_is_no_global_model_before_a_round_nor_where_nobody_tells() -> None:
    with pytest.raises(RunFailed, match=r"global_model\(...\) needs configure_train\(...\) before it"):
        FedBN(net()).global_model(1, begin())
    strategy = FedBN(net(), fraction_evaluate=0)
    (arrays,) = rounds(strategy, grid("fedbn"), 1)
    assert strategy.global_model(1, arrays) is None


@pytest.mark.parametrize("method", ["fedbn", "hbn", "scaffold"])
def test_a_second_start_on_one_grid_is_a_new_beginning(method: str) -> None:
    """A client that trained in the first run, and is drawn later in the second, kept tensors of the first without a word."""
    objective = Scaffold() if method == "scaffold" else PLAIN
    own = METHODS["fedavg" if method == "scaffold" else method]()
    app = ClientApp()
    answer(app, net, own, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), own, data(client_of(context)), objective=objective) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in data(client_of(context)):
                optimizer.zero_grad()
                round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x)
                optimizer.step()
        return round.message(SAMPLES, 1.0)

    def end(over: Any, rounds: int, seed: int) -> tuple[ArrayRecord, list[list[int]]]:
        strategy = OwnAppStrategy(net(), own, fraction_train=0.34, min_train_nodes=1, fraction_evaluate=0, seed=seed, objective=objective)
        result = strategy.start(over, begin(), num_rounds=rounds)
        return result.arrays, [[client.client for client in record.clients] for record in result.records]

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
