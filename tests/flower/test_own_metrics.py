"""Metrics of one's own, of training and of evaluations: combined, per client, shown, and under whatever name their record has."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict

from fl_bn.flower import FedAvgBN, FedBN, InProcessGrid, RunFailed
from tests.flower.own_apps import CLIENTS, SAMPLES, net, own_app
from tests.in_process import WatchedGrid


def ran(strategy: Any, app: Any, rounds: int = 1) -> Any:
    return strategy.start(InProcessGrid(app, CLIENTS, {}), num_rounds=rounds)


def test_training_metrics_reach_the_result_weighted_and_per_client(log: pytest.LogCaptureFixture) -> None:
    result = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg"), rounds=2)
    for round in (1, 2):
        metrics = result.train_metrics_clientapp[round]
        assert metrics["my_acc"] == pytest.approx(0.2)  # of .1, .2 and .3
        assert metrics["my_f1"] == pytest.approx(0.5)
        assert metrics["samples"] == CLIENTS * SAMPLES
        own = result.records[round - 1].client_metrics
        assert [own[client]["my_acc"] for client in range(CLIENTS)] == pytest.approx([0.1, 0.2, 0.3])
        assert result.records[round - 1].own_metrics["my_acc"] == pytest.approx(0.2)
    assert "my_acc 0.2" in log.text


def test_a_metric_that_is_written_into_the_reply_counts_too() -> None:
    """As in Flower's examples: ``reply.content["metrics"]["my_acc"]``."""

    def after(message: Message, context: Context, reply: Message) -> None:
        assert dict(reply.content["metrics"])["num-examples"] == SAMPLES  # type: ignore[call-overload]
        reply.content["metrics"]["late"] = 2.5  # type: ignore[call-overload,index]
        reply.content["more"] = MetricRecord({"other": 1.5})

    metrics = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", after=after)).train_metrics_clientapp[1]
    assert (metrics["late"], metrics["other"]) == (2.5, 1.5)


def test_they_are_weighted_by_the_samples_or_by_the_user_s_key() -> None:
    def metrics(loss: float, client: int) -> dict[str, Any]:
        return {"height": float(client), "mass": [0.0, 1.0, 3.0][client], "num-examples": [30, 10, 40][client]}

    app = own_app("fedavg", metrics=metrics)
    by_examples = ran(FedAvgBN(net(), fraction_evaluate=0), app).train_metrics_clientapp[1]
    assert by_examples["height"] == pytest.approx((10 + 2 * 40) / 80)
    by_mass = ran(FedAvgBN(net(), fraction_evaluate=0, weighted_by_key="mass"), app).train_metrics_clientapp[1]
    assert by_mass["height"] == pytest.approx((1 * 1 + 2 * 1) / 2)  # none weighs more than all others together: 3 becomes 1
    assert "mass" not in by_mass


def test_a_number_that_cannot_count_costs_its_metrics_alone(log: pytest.LogCaptureFixture) -> None:
    def metrics(loss: float, client: int) -> dict[str, Any]:
        return {"my_acc": float("nan") if client == 1 else 0.5}

    result = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", metrics=metrics))
    assert result.train_metrics_clientapp[1]["my_acc"] == 0.5
    assert len(result.records[0].accepted) == CLIENTS  # its weights count
    assert "client 1's own training metrics are not counted: metrics/my_acc: expected a finite number, but got nan" in log.text


def test_a_metric_with_the_name_of_fl_bn_s_own_number_is_said_once(log: pytest.LogCaptureFixture) -> None:
    def metrics(loss: float, client: int) -> dict[str, Any]:
        return {"loss": 7.0, "samples": 3.0}

    result = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", metrics=metrics), rounds=2)
    said = [line.partition(" in ")[0] for line in log.messages if "is fl-bn's own number, not your metric" in line]
    assert said == ["loss", "samples"]
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(result.records[0].loss)
    assert result.train_metrics_clientapp[1]["samples"] == CLIENTS * SAMPLES
    assert result.records[0].client_metrics[0] == {"loss": 7.0, "samples": 3.0}
    log.clear()
    ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg"))
    assert "fl-bn's own number" not in log.text  # control: the loss that round.message got is no other number


def test_lists_are_left_out_with_the_name_of_what_combines_them(log: pytest.LogCaptureFixture) -> None:
    """Of training metrics it said evaluate_metrics_aggr_fn, which does not get them."""

    def metrics(loss: float, client: int) -> dict[str, Any]:
        return {"per-class": [0.25, 0.75]}

    result = ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", metrics=metrics))
    assert "per-class" not in result.train_metrics_clientapp[1]
    words = "metric per-class is a list, and lists are not averaged: to combine it, give the strategy train_metrics_aggr_fn=..."
    assert words in log.messages
    log.clear()

    def last(records: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"per-class": records[-1]["metrics"]["per-class"]})  # type: ignore[arg-type,call-overload,index,dict-item]

    result = ran(FedAvgBN(net(), fraction_evaluate=0, train_metrics_aggr_fn=last), own_app("fedavg", metrics=metrics))
    assert result.train_metrics_clientapp[1]["per-class"] == [0.25, 0.75]
    assert "is a list" not in log.text


def test_an_evaluation_under_another_name_is_counted_and_shown(log: pytest.LogCaptureFixture) -> None:
    result = ran(FedAvgBN(net()), own_app("fedavg", record="my-results"))
    metrics = result.evaluate_metrics_clientapp[1]
    assert metrics["eval_acc"] == pytest.approx((0.2 * 1 + 0.4 * 2 + 0.6 * 3) / 6)
    assert "eval_acc 0.4667" in log.text
    assert result.records[0].client_evaluation[2]["eval_acc"] == pytest.approx(0.6)


def test_two_records_with_one_name_are_refused_by_name(log: pytest.LogCaptureFixture) -> None:
    def after(message: Message, context: Context, reply: Message) -> None:
        reply.content["more"] = MetricRecord({"my_acc": 1.0})

    ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", after=after))
    assert "more/my_acc: two metric records have a metric of this name" in log.text


def test_functions_of_one_s_own_combine_them() -> None:
    seen: list[tuple[list[RecordDict], str]] = []

    def largest(records: list[RecordDict], key: str) -> MetricRecord:
        seen.append((records, key))
        name = "my_acc" if "my_acc" in records[0]["metrics"] else "eval_acc"  # type: ignore[operator]
        return MetricRecord({name: max(float(r["metrics"][name]) for r in records)})  # type: ignore[arg-type,call-overload,index]

    strategy = FedBN(net(), train_metrics_aggr_fn=largest, evaluate_metrics_aggr_fn=largest, weighted_by_key="mass")
    result = ran(strategy, own_app("fedbn"))
    assert dict(result.train_metrics_clientapp[1]) == {"my_acc": pytest.approx(0.3)}
    assert dict(result.evaluate_metrics_clientapp[1]) == {"eval_acc": pytest.approx(0.6)}
    assert [(len(records), key) for records, key in seen] == [(CLIENTS, "mass")] * 2
    assert all(name == "metrics" for records, _ in seen for record in records for name in record)  # nothing of fl-bn's
    with pytest.raises(RunFailed, match="train_metrics_aggr_fn must return a MetricRecord, but returned a dict"):
        ran(FedBN(net(), train_metrics_aggr_fn=lambda records, key: {}), own_app("fedbn"))  # type: ignore[arg-type,return-value]


def test_flower_s_own_functions_do() -> None:
    from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

    strategy = FedAvgBN(net(), train_metrics_aggr_fn=aggregate_metricrecords, evaluate_metrics_aggr_fn=aggregate_metricrecords)
    result = ran(strategy, own_app("fedavg"))
    assert result.train_metrics_clientapp[1]["my_acc"] == pytest.approx(0.2)
    assert result.evaluate_metrics_clientapp[1]["eval_acc"] == pytest.approx((0.2 * 1 + 0.4 * 2 + 0.6 * 3) / 6)


def test_a_client_s_own_metrics_are_in_the_disclosure_report() -> None:
    grid = WatchedGrid(own_app("fedavg"), CLIENTS)
    result = FedAvgBN(net(), fraction_evaluate=0).start(grid, num_rounds=1)
    assert {d.section for d in result.records[0].disclosures} >= {"own metrics", "metrics", "weights"}


def test_functions_of_one_s_own_get_the_clients_that_count(log: pytest.LogCaptureFixture) -> None:
    """Before, they got the metrics of which the log said that they are not counted."""
    got: list[int] = []

    def combined(records: list[RecordDict], key: str) -> MetricRecord:
        got.append(len(records))
        return MetricRecord({"acc": sum(float(record["metrics"]["my_acc"]) for record in records) / len(records)})  # type: ignore[index,call-overload]

    app = own_app("fedavg", metrics=lambda loss, client: {"my_acc": float("nan") if client == 1 else 0.5})
    result = ran(FedAvgBN(net(), fraction_evaluate=0, train_metrics_aggr_fn=combined), app)
    assert got == [2]
    assert result.train_metrics_clientapp[1]["acc"] == 0.5
    assert "client 1's own training metrics are not counted" in log.text


class Forgetful(FedAvgBN):
    """Its hook has no return."""

    def __init__(self, hook: str, **options: Any) -> None:
        super().__init__(net(), **options)
        setattr(self, hook, lambda *args, **named: None)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("configure_train", r"configure_train returned None: let it return the messages of super\(\).configure_train"),
        ("configure_evaluate", r"configure_evaluate returned None"),
        ("aggregate_train", r"aggregate_train must return a pair, arrays and metrics, .* but returned None"),
    ],
)
def test_a_hook_without_return_is_named(hook: str, words: str) -> None:
    with pytest.raises(RunFailed, match=words):
        ran(Forgetful(hook), own_app("fedavg"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fraction_train": "0.5"}, "fraction_train must be a share of the clients, a number of at most 1, but got '0.5'"),
        ({"fraction_evaluate": None}, "fraction_evaluate must be a share of the clients"),
        ({"clients": "3"}, "clients must be 1..100000, or 0 to take .*, but got '3'"),
        ({"ranges": {"acc": 100}}, r"ranges must give a metric's smallest and largest value, such as .*'acc': \(0, 100\)\}, but got 100"),
    ],
)
def test_an_argument_of_another_type_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FedAvgBN(net(), **given)


@pytest.mark.parametrize("timeout", [None, 0, "60"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, but got"):
        FedAvgBN(net()).start(InProcessGrid(own_app("fedavg"), CLIENTS, {}), num_rounds=1, timeout=timeout)
