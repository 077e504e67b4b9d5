"""What others write in apps of their own: other options and objectives on the two sides, NumPy's numbers, clients without data."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F

from fl_bn import EarlyStop, Federation, convert, flower, methods
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation import momentum
from fl_bn.federation.best import KeepBest
from fl_bn.federation.callbacks import Running
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import (
    FBN,
    HBN,
    FedAvgBN,
    FedBN,
    FedTAN,
    FixBN,
    InProcessGrid,
    RunFailed,
    answer,
    legacy_server_app,
    replayed,
    training,
)
from fl_bn.methods import Method
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Objective, Scaffold
from fl_bn.task import CLASSIFICATION
from tests.flower.own_apps import CLIENTS, SAMPLES, client_of, config, data, net, own_app

Strategies = Any


def ran(strategy: Any, app: ClientApp, rounds: int = 1, **named: Any) -> Any:
    return strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds, **named)


# Options of the method

DIFFER = [  # strategy, the client's method
    (FBN(net(), momentum=0.1), methods.fbn()),
    (FBN(net(), momentum=0.1, report="all"), methods.fbn(momentum=0.1)),
    (FBN(net()), methods.fbn(report="pass")),
    (HBN(net(), mixing="half"), methods.hbn()),
    (HBN(net(), lam=0.5), methods.hbn()),
    (HBN(net()), methods.hbn(lower_layers="shared")),
    (HBN(net(), measured="normalisers"), methods.hbn()),
    (FixBN(net(), freeze_after=1, freeze_what="affine"), methods.fixbn(freeze_after=1)),
    (FedTAN(net(), schedule="paper"), methods.fedtan()),
    (FedTAN(net()), methods.fedtan(momentum="restarted")),
    (flower.OwnAppStrategy(net(), methods.gn(groups=2)), methods.gn(groups=3)),
]
SERVERS = [  # only the server uses these options
    (FixBN(net(), freeze_after=1, frozen_rate=1.0, fraction_evaluate=0), methods.fixbn()),
    (FBN(net(), tracking=0.5, fraction_evaluate=0), methods.fbn()),
    (HBN(net(), merge="average", fraction_evaluate=0), methods.hbn()),
]


@pytest.mark.parametrize(("strategy", "method"), DIFFER)
def test_an_option_that_differs_at_the_clients_is_refused(strategy: Strategies, method: Method) -> None:
    with pytest.raises(RunFailed, match="client 0 has another model, method or version of fl-bn, or another option of the method"):
        ran(strategy, own_app(method))


@pytest.mark.parametrize(("strategy", "method"), SERVERS)
def test_control_an_option_that_only_the_server_uses_may_differ(strategy: Strategies, method: Method) -> None:
    assert ran(strategy, own_app(method), rounds=2).records[-1].aggregated


# Objectives


def app_with(objective: Objective, method: Method | None = None, loss: bool = True) -> ClientApp:
    """An app whose loop calls ``round.backward``."""
    app, method = ClientApp(), method or methods.fedavg()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method, objective=objective) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=round.learning_rate)
            for x, y in data(client_of(context)):
                optimizer.zero_grad()
                value = round.backward(lambda x=x, y=y: F.cross_entropy(round.model(x), y), x)  # type: ignore[misc]
                optimizer.step()
            assert round.steps == 2
            assert int(round.batch) == SAMPLES // 2 or objective.repeats
            assert round.instruction.round == round.number
        return round.message(SAMPLES, value.item()) if loss else round.message(SAMPLES)

    return app


OBJECTIVES: list[Objective] = [FedProx(mu=1.0), FedSAM(), Scaffold()]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_of_the_server_s_alone_is_refused(objective: Objective) -> None:
    kind = type(objective).__name__
    with pytest.raises(RunFailed, match=rf"the server expects the objective {kind}\(.*, but this client's loop has none"):
        ran(FedAvgBN(net(), objective=objective), app_with(PLAIN))


def test_so_is_one_with_another_strength() -> None:
    with pytest.raises(RunFailed, match=r"expects the objective FedProx\(mu=1.0\), but this client's loop has FedProx\(mu=0.5\)"):
        ran(FedAvgBN(net(), objective=FedProx(mu=1.0)), app_with(FedProx(mu=0.5)))


def test_scaffold_at_the_clients_alone_is_refused_by_name() -> None:
    with pytest.raises(RunFailed, match=r"has an objective with control variates, but the server sends none"):
        ran(FedAvgBN(net()), app_with(Scaffold()))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_control_the_same_objective_on_both_sides(objective: Objective) -> None:
    result = ran(FedAvgBN(net(), objective=objective, fraction_evaluate=0), app_with(objective), rounds=2)
    plain = ran(FedAvgBN(net(), fraction_evaluate=0), app_with(PLAIN), rounds=2)
    moved = [not torch.equal(a, b) for a, b in zip(*(r.arrays.to_torch_state_dict().values() for r in (result, plain)), strict=True)]
    assert any(moved)


@pytest.mark.parametrize("objective", OBJECTIVES[:2])
def test_the_server_need_not_know_an_objective_that_does_not_travel(objective: Objective) -> None:
    assert ran(FedAvgBN(net(), fraction_evaluate=0), app_with(objective)).records[-1].aggregated


# NumPy's numbers


def test_numpy_s_numbers_are_rates_and_metrics(log: pytest.LogCaptureFixture) -> None:
    app = own_app(
        "fixbn",
        rate=lambda message: message.content["config"]["lr"],  # type: ignore[call-overload,index,return-value]
        metrics=lambda loss, client: {"my_acc": np.float64(0.5)},
    )
    results = [
        ran(FixBN(net(), freeze_after=1, fraction_evaluate=0), app, rounds=2, train_config=ConfigRecord({"lr": kind(0.1)}))
        for kind in (float, np.float64)
    ]
    for tensors in zip(*(result.arrays.to_torch_state_dict().values() for result in results), strict=True):
        assert torch.equal(*tensors)
    assert results[1].train_metrics_clientapp[1]["my_acc"] == 0.5
    assert "not counted" not in log.text


# Weights


@pytest.mark.parametrize("lacking", [{0}, {0, 1, 2}])
def test_a_weight_that_training_metrics_lack_is_said_once(lacking: set[int], log: pytest.LogCaptureFixture) -> None:
    def metrics(loss: float, client: int) -> dict[str, Any]:
        return {"my_acc": float(client)} | ({} if client in lacking else {"mass": 1.0 + client})

    ran(FedAvgBN(net(), fraction_evaluate=0, weighted_by_key="mass"), own_app("fedavg", metrics=metrics), rounds=2)
    said = [line for line in log.messages if line.startswith("weighted_by_key='mass'")]
    assert len(said) == 1
    assert ("clients 0, 1, 2 lack it" if len(lacking) > 1 else "client 0 lack it") in said[0].replace("clients 0 ", "client 0 ")


# Clients without data, and without a loss


def test_a_client_without_data_in_a_round_is_left_out(log: pytest.LogCaptureFixture) -> None:
    app, method = ClientApp(), methods.fbn()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        batches = [] if client_of(context) == 1 else data(client_of(context))
        with training(message, context, net(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        return round.message(sum(len(x) for x, _ in batches), 1.0)

    (record,) = ran(FBN(net(), fraction_evaluate=0), app).records
    assert [client.client for client in record.accepted] == [0, 2]
    assert "client 1's reply is not used: metrics/samples: 0: the client trained on no samples in this round" in log.text


def test_a_loss_that_is_not_told_is_no_loss_of_0() -> None:
    result = ran(FedAvgBN(net(), fraction_evaluate=0), app_with(PLAIN, loss=False))
    assert math.isnan(result.train_metrics_clientapp[1]["loss"])
    assert result.records[0].aggregated


# Words


def test_a_reply_of_ones_own_is_told_what_makes_it() -> None:
    app = own_app("fedavg")

    def replies(message: Message, context: Context, handler: Any) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 3})}), reply_to=message)

    other, method = ClientApp(), methods.fedavg()
    answer(other, net, method, lambda context: data(client_of(context)))
    other.train()(lambda message, context: replies(message, context, app))
    with pytest.raises(RunFailed, match=r"a train handler returns round.message\(...\), which makes this header"):
        ran(FedAvgBN(net()), other)


def test_a_handler_that_reads_the_arrays_is_told_what_loads_them() -> None:
    def before(message: Message, context: Context) -> None:
        message.content["arrays"]

    with pytest.raises(RunFailed, match=r"training\(...\) and evaluating\(...\) load the tensors into the network"):
        ran(FedAvgBN(net()), own_app("fedavg", before=before))


@pytest.mark.parametrize("rounds", [-1, 2.0, "2", True])
def test_a_number_of_rounds_that_is_none_is_refused(rounds: Any) -> None:
    with pytest.raises(ValueError, match="num_rounds must be a whole number of rounds, 0 or more"):
        ran(FedAvgBN(net()), own_app("fedavg"), rounds=rounds)


@pytest.mark.parametrize(("strategy", "method", "said"), [(FedBN, "fedbn", True), (FedAvgBN, "fedavg", False)])
def test_another_start_in_one_run_is_said_where_clients_keep_layers(
    strategy: Any, method: str, said: bool, log: pytest.LogCaptureFixture
) -> None:
    grid = InProcessGrid(own_app(method), CLIENTS, {})
    arrays = strategy(net(), fraction_evaluate=0).start(grid, num_rounds=1).arrays
    assert "start was called again" not in log.text
    strategy(net(), fraction_evaluate=0).start(grid, num_rounds=1, train_config=config(lr=0.1))
    assert ("start was called again in one run of Flower's. Under fedbn every client then begins" in log.text) is said
    assert arrays


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("configrecord_key", "has no configrecord_key, so its clients would not get their config"),
        ("weighted_by_key", "has no weighted_by_key, so the weights are the numbers of samples"),
        ("evaluate_metrics_aggr_fn", "set it there, as evaluate_metrics_aggregation_fn"),
        ("train_metrics_aggr_fn", "set it there, as fit_metrics_aggregation_fn"),
    ],
)
def test_what_an_older_strategy_gives_or_cannot_follow_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        legacy_server_app(lambda context: None, net, methods.fedavg(), **{name: None})  # type: ignore[arg-type,return-value]




# Weights of 0


def evaluated(samples: list[int]) -> tuple[Any, ClientApp]:
    """A strategy, and an app whose clients evaluate on so many samples."""
    app, method = own_app("fedavg"), methods.fedavg()
    other = ClientApp()
    answer(other, net, method, lambda context: data(client_of(context)))
    other.train()(lambda message, context: app(message, context))

    @other.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = client_of(context)
        own = MetricRecord({"num-examples": samples[client], "my_acc": 0.1 * (client + 1)})
        return Message(RecordDict({"metrics": own}), reply_to=message)

    return FedAvgBN(net()), other


@pytest.mark.parametrize(("samples", "mean"), [([5, 0, 0], 0.1), ([0, 5, 5], 0.25), ([5, 5, 100], (0.1 * 5 + 0.2 * 5 + 0.3 * 10) / 20)])
def test_clients_without_test_samples_leave_the_mean_to_the_others(samples: list[int], mean: float) -> None:
    assert ran(*evaluated(samples)).evaluate_metrics_clientapp[1]["my_acc"] == pytest.approx(mean)


def test_no_test_sample_at_all_is_said(log: pytest.LogCaptureFixture) -> None:
    assert not ran(*evaluated([0, 0, 0])).evaluate_metrics_clientapp
    assert "no metric is averaged, because all clients' weights (num-examples) are 0" in log.text


# Frozen rounds


def an_epoch(model: torch.nn.Module, client: int, rate: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for x, y in data(client):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(("base", "obeys", "said"), [(0.1, True, False), (0.1, False, True), (0.001, True, False), (0.001, False, True)])
def test_a_loop_that_ignores_the_lower_rate_is_told_and_no_other(
    base: float, obeys: bool, said: bool, log: pytest.LogCaptureFixture
) -> None:
    app, method = ClientApp(), methods.fixbn(freeze_after=1)
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            an_epoch(round.model, client_of(context), base * (round.rate_share if obeys else 1.0))
        return round.message(SAMPLES)

    ran(FixBN(net(), freeze_after=1, fraction_evaluate=0), app, rounds=3)
    assert ("multiply your rate by round.instruction.rate_share" in log.text) is said


def test_clients_with_several_rates_are_not_told_if_all_obey(log: pytest.LogCaptureFixture) -> None:
    app, method = ClientApp(), methods.fixbn(freeze_after=1)
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            an_epoch(round.model, client_of(context), [0.1, 0.05, 0.001][client_of(context)] * round.rate_share)
        return round.message(SAMPLES)

    ran(FixBN(net(), freeze_after=1, fraction_evaluate=0), app, rounds=3)
    assert "multiply your rate by round.instruction.rate_share" not in log.text


# The best evaluation


@pytest.mark.parametrize(("metric", "kept"), [("eval_loss", 1), ("my_f1", 3), ("val_MSE", 1), ("perplexity", 1)])
def test_the_best_value_of_a_metric_is_the_lower_one_where_its_name_says_so(metric: str, kept: int, tmp_path: Any) -> None:
    best = KeepBest(tmp_path / "best.safetensors", metric=metric)
    running = Running(CLASSIFICATION, lambda: None, lambda: None)  # type: ignore[arg-type]
    best.on_start(running)
    best.improved = lambda record: None  # type: ignore[method-assign]
    for round in (1, 2, 3):
        best.on_evaluation(RoundRecord(round, "train", 0.1, evaluation={metric: float(round)}), 3)
    assert best.round == kept


# Networks


def test_fedbn_without_batch_norm_has_a_global_model() -> None:
    def plain() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))

    app, method, seen = ClientApp(), methods.fedbn(), []
    answer(app, plain, method, lambda context: data(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, plain(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            F.cross_entropy(round.model(data(0)[0][0]), data(0)[0][1]).backward()
            optimizer.step()
        return round.message(8)

    ran(FedBN(plain(), fraction_evaluate=0), app, rounds=2, evaluate_fn=lambda number, arrays: seen.append(number))
    assert seen == [0, 1, 2]


WRONG: dict[str, Any] = {
    "the class": (lambda: FBN(torch.nn.Linear), "model must be a network, an object such as Net(), but got Linear itself"),
    "a function": (lambda: flower.OwnAppStrategy(net(), methods.fbn), "method must be what a function of fl_bn.methods returns"),
    "a name": (lambda: flower.OwnAppStrategy(net(), "fbn"), "such as fbn(), but got 'fbn'"),  # type: ignore[arg-type]
    "optimizer": (lambda: FBN(net(), optimizer="fedadam"), "optimizer must be an object such as"),
    "defence": (lambda: FBN(net(), defence="median"), "defence must be an object such as"),
    "objective": (lambda: FBN(net(), objective="fedprox"), "objective must be an object such as"),
    "convert": (lambda: convert(net, methods.fbn()), "model must be a network, an object such as Net(), but got net itself"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_kind_is_refused_in_words(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(TypeError) as caught:
        make()
    assert words in str(caught.value)


def test_a_single_callback_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"callbacks must be a list of callbacks, but got a single EarlyStop: give callbacks=\["):
        FBN(net(), callbacks=EarlyStop(2))  # type: ignore[arg-type]
    FBN(net(), callbacks=[EarlyStop(2)])  # control


# The strategy


def test_hbn_tracks_as_its_page_says_where_a_part_of_the_clients_takes_part() -> None:
    part, page = HBN(net(), fraction_train=0.5), methods.hbn(fraction=0.5)
    assert part._given.method.combine.keywords == page.combine.keywords  # type: ignore[attr-defined]
    assert HBN(net())._given.method.combine.keywords != page.combine.keywords  # type: ignore[attr-defined]


def test_a_setting_that_a_hook_changes_is_said(log: pytest.LogCaptureFixture) -> None:
    class Changes(FedAvgBN):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            self.fraction_train = 0.3 if server_round > 1 else 1.0
            return super().configure_train(server_round, arrays, config, grid)

    ran(Changes(net(), fraction_evaluate=0), own_app("fedavg"), rounds=3)
    assert log.text.count("strategy.fraction_train was changed during the run. That has no effect") == 1


def test_a_strategy_can_be_copied_and_pickled() -> None:
    strategy = FedAvgBN(net(), fraction_evaluate=0)
    wanted = ran(strategy, own_app("fedavg")).arrays.to_torch_state_dict()
    for other in (copy.deepcopy(FedAvgBN(net(), fraction_evaluate=0)), pickle.loads(pickle.dumps(FedAvgBN(net(), fraction_evaluate=0)))):
        got = ran(other, own_app("fedavg")).arrays.to_torch_state_dict()
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


# FedTAN by replay


@pytest.mark.parametrize("seeded", [True, False])
def test_a_round_that_draws_other_numbers_when_it_is_repeated_is_refused(seeded: bool) -> None:
    app, method = ClientApp(), methods.fedtan()
    answer(app, net, method, lambda context: data(client_of(context)))

    @app.train(mods=[replayed])
    def train(message: Message, context: Context) -> Message:
        x, y = data(client_of(context))[0]
        with training(message, context, net(), method) as round:
            x = x + torch.tensor(np.random.default_rng(round.number if seeded else None).normal(size=x.shape), dtype=x.dtype)
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            F.cross_entropy(round.model(x), y).backward()
            optimizer.step()
        return round.message(len(x))

    strategy = FedTAN(net(), fraction_evaluate=0, exchange=ExchangeSettings("replay"))
    if seeded:
        assert ran(strategy, app).records[0].aggregated
        return
    with pytest.raises(RunFailed, match="its repetition of the round computed other values than before"):
        ran(strategy, app)


# Weights of clients, and FedTAN's optimiser


def test_every_client_may_count_once() -> None:
    sizes = [16, 8, 8]

    def some(client: int) -> Any:
        return [(x, y) for x, y in data(client)][: sizes[client] // 8]

    app, method, states = ClientApp(), methods.fedavg(), list[Any]()
    answer(app, net, method, lambda context: some(client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), method) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, y in some(client_of(context)):
                optimizer.zero_grad()
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        states.append((sizes[client_of(context)], {name: tensor.clone() for name, tensor in round.model.state_dict().items()}))
        return round.message(sizes[client_of(context)])

    for weights in ("samples", "uniform"):
        states.clear()
        result = ran(FedAvgBN(net(), fraction_evaluate=0, client_weights=weights), app).arrays.to_torch_state_dict()
        total = sum(size if weights == "samples" else 1 for size, _ in states)
        mean = sum((size if weights == "samples" else 1) / total * state["0.weight"] for size, state in states)
        torch.testing.assert_close(result["0.weight"], mean)
    with pytest.raises(ValueError, match="client_weights"):
        FedAvgBN(net(), client_weights="equal")


@pytest.mark.parametrize(("kind", "said"), [(torch.optim.Adam, True), (torch.optim.SGD, False)])
def test_fedtan_with_another_optimiser_than_sgd_is_told(
    kind: Any, said: bool, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(momentum, "_WARNED", set())
    batches = [[(x, y) for x, y in data(client)] for client in range(2)]
    list(Federation(net(), methods.fedtan(), batches, optimizer=lambda p: kind(p, lr=0.01), progress=False).run(2))
    assert log.text.count("first step equal a step of centralised training") == said
