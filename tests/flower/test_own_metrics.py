"""Metrics of one's own, of training, of evaluations and of ``evaluate_fn``: combined, per client, and loadable into one's network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fl_bn.flower import FedAvgBN, FedBN, InProcessGrid, OwnAppStrategy
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, SAMPLES, begin, data, net, own_app, pretrained, ran, tensors
from tests.in_process import WatchedGrid
from tests.listed import listed


def trained(**options: Any) -> Any:
    """Run a round of an app under FedAvg that nobody evaluates."""
    return ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", **options))


def test_training_metrics_reach_the_result_weighted_and_per_client() -> None:
    result = trained()
    metrics, record = result.train_metrics_clientapp[1], result.records[0]
    assert metrics["my_acc"] == pytest.approx(0.2)  # of .1, .2 and .3
    assert metrics["samples"] == CLIENTS * SAMPLES
    assert [record.client_metrics[client]["my_acc"] for client in range(CLIENTS)] == pytest.approx([0.1, 0.2, 0.3])
    assert record.own_metrics["my_acc"] == pytest.approx(0.2)
    assert {d.section for d in record.disclosures} >= {"own metrics", "metrics", "weights"}


def test_they_are_weighted_by_the_samples_or_by_the_user_s_key() -> None:
    def metrics(loss: float, client: int) -> dict[str, Any]:
        seldom = {"depth": float(client)} if client else {}
        return {"height": float(client), "mass": [0.0, 1.0, 3.0][client], "num-examples": [30, 10, 40][client], **seldom}

    means = trained(metrics=metrics).train_metrics_clientapp[1]
    assert means["height"] == pytest.approx((10 + 2 * 40) / 80)
    assert means["depth"] == pytest.approx((10 + 2 * 40) / 50)  # over those that send it
    strategy = FedAvgBN(net(), fraction_evaluate=0, weighted_by_key="mass")
    by_mass = ran(strategy, own_app("fedavg", metrics=metrics)).train_metrics_clientapp[1]
    assert by_mass["height"] == pytest.approx((1 * 1 + 2 * 3) / 4)


@listed(
    ("app", "left", "word"),
    [
        ({"metrics": lambda loss, i: {"my_acc": float("nan") if i == 1 else 0.5}}, {"my_acc": 0.5}, "client 1's own training metrics"),
        ({"metrics": lambda loss, i: {"per-class": [0.25, 0.75]}}, {}, "train_metrics_aggr_fn"),
    ],
)
def test_a_metric_that_cannot_count_costs_itself_alone_and_is_named(
    app: Any, left: dict[str, Any], word: str, log: pytest.LogCaptureFixture
) -> None:
    result = trained(**app)
    assert len(result.records[0].accepted) == CLIENTS  # the weights of all clients count
    metrics = result.train_metrics_clientapp[1]
    assert {name: value for name, value in metrics.items() if name not in ("loss", "samples")} == left
    assert word in log.text


def test_functions_of_one_s_own_combine_the_metrics_that_count() -> None:
    seen: list[tuple[list[RecordDict], str]] = []

    def largest(records: list[RecordDict], key: str) -> MetricRecord:
        seen.append((records, key))
        name = "my_acc" if "my_acc" in records[0]["metrics"] else "eval_acc"
        return MetricRecord({name: max(float(r["metrics"][name]) for r in records)})

    app = own_app("fedbn", metrics=lambda loss, client: {"my_acc": float("nan") if client == 2 else 0.1 * (client + 1)})
    strategy = FedBN(net(), train_metrics_aggr_fn=largest, evaluate_metrics_aggr_fn=largest, weighted_by_key="mass")
    result = ran(strategy, app)
    assert dict(result.train_metrics_clientapp[1]) == {"my_acc": pytest.approx(0.2)}
    assert dict(result.evaluate_metrics_clientapp[1]) == {"eval_acc": pytest.approx(0.6)}
    assert [(len(records), key) for records, key in seen] == [(CLIENTS - 1, "mass"), (CLIENTS, "mass")]
    assert all(name == "metrics" for records, _ in seen for record in records for name in record)  # nothing of fl-bn's


Seen = dict[int, dict[str, torch.Tensor]]


def central(name: str, grid: Any = None, **options: Any) -> tuple[Seen, Any]:
    """Run two rounds, whose networks are evaluated at the server; return the tensors that it got, and the result."""
    seen: Seen = {}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = net(3)
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        seen[server_round] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            x, y = data(0)[0]
            return MetricRecord({"my_server_acc": float((model.eval()(x).argmax(1) == y).double().mean())})

    strategy = OwnAppStrategy(net(), METHODS[name](), fraction_evaluate=0)
    over = grid or InProcessGrid(own_app(name, tells=True), CLIENTS, {})
    return seen, strategy.start(over, num_rounds=2, evaluate_fn=evaluate, **options)


def test_the_arrays_load_into_the_user_s_network() -> None:
    seen, result = central("fbn", initial_arrays=begin())
    assert set(seen) == set(result.evaluate_metrics_serverapp) == {0, 1, 2}
    start = pretrained().state_dict()  # round 0 is of the arrays that the run starts with
    assert all(torch.equal(tensor, start[key]) for key, tensor in seen[0].items() if not key.endswith("tracked"))
    assert not torch.equal(seen[2]["0.weight"], seen[0]["0.weight"])
    assert not torch.equal(seen[2]["1.running_mean"], seen[0]["1.running_mean"])
    assert int(seen[2]["1.num_batches_tracked"]) == 4  # two rounds of two batches
    assert result.records[-1].evaluation["my_server_acc"] == result.evaluate_metrics_serverapp[2]["my_server_acc"]
    net(3).load_state_dict(result.arrays.to_torch_state_dict(), strict=True)  # as Flower's quickstart ends


def test_batch_norm_that_stays_at_home_is_the_clients_average() -> None:
    grid = WatchedGrid(own_app("fedbn", tells=True), CLIENTS)
    seen, _ = central("fedbn", grid)
    own = [tensors(state["fl-bn/local"]) for state in grid.states()]
    for key in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
        assert torch.allclose(seen[2][key], sum(one[key] for one in own) / CLIENTS)
        assert not torch.allclose(seen[2][key], own[0][key])  # control
    assert any(m.metadata.message_type == "query.kept" for m in grid.sent)


@listed(("name", "tells"), [("fedbn", False), ("single", True)])
def test_where_there_is_no_global_model_it_is_not_called_and_the_log_says_so(name: str, tells: bool, log: pytest.LogCaptureFixture) -> None:
    seen, result = central(name, InProcessGrid(own_app(name, tells=tells), CLIENTS, {}))
    assert set(seen) == {0}
    assert len(result.records) == 2
    assert log.text.count("evaluate_fn is not called") == 1
