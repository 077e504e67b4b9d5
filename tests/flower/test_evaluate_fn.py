"""``evaluate_fn`` gets arrays that load into the user's own network, from round 0 on, under every method, or the log says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord

from fl_bn import convert
from fl_bn.flower import FixBN, InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, data, net, own_app, pretrained
from tests.in_process import WatchedGrid
from tests.listed import listed

Seen = dict[int, dict[str, torch.Tensor]]


def evaluated(seen: Seen) -> Any:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = net(3)
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        seen[server_round] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            x, y = data(0)[0]
            return MetricRecord({"my_server_acc": float((model.eval()(x).argmax(1) == y).double().mean())})

    return evaluate


def ran(name: str, seen: Seen, grid: Any = None, **options: Any) -> Any:
    grid = grid or InProcessGrid(own_app(name, tells=True), CLIENTS, {})
    strategy = OwnAppStrategy(net(), METHODS[name](), fraction_evaluate=0)
    return strategy.start(grid, num_rounds=2, evaluate_fn=evaluated(seen), **options)


@listed("name", ["fedavg", "fixbn", "fedbn", "silobn", "hbn", "fbn", "fedtan", "fedtan2"])
def test_the_arrays_load_into_the_user_s_network(name: str) -> None:
    seen: Seen = {}
    result = ran(name, seen)
    assert set(seen) == set(result.evaluate_metrics_serverapp) == {0, 1, 2}
    assert all(torch.equal(tensor, net().state_dict()[key]) for key, tensor in seen[0].items())
    assert not torch.equal(seen[2]["0.weight"], seen[0]["0.weight"])
    assert not torch.equal(seen[2]["1.running_mean"], seen[0]["1.running_mean"])
    assert int(seen[2]["1.num_batches_tracked"]) == 4  # two rounds of two batches
    assert result.records[-1].evaluation["my_server_acc"] == result.evaluate_metrics_serverapp[2]["my_server_acc"]


def test_batch_norm_that_stays_at_home_is_the_clients_average(log: pytest.LogCaptureFixture) -> None:
    seen: Seen = {}
    grid = WatchedGrid(own_app("fedbn", tells=True), CLIENTS)
    ran("fedbn", seen, grid)
    own = [state["fl-bn/local"] for state in grid.states()]
    for key in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
        mean = sum(torch.from_numpy(record[key].numpy().copy()) for record in own) / CLIENTS  # type: ignore[union-attr,index,arg-type]
        assert torch.allclose(seen[2][key], mean)
        assert not torch.allclose(seen[2][key], torch.from_numpy(own[0][key].numpy().copy()))  # control  # type: ignore[union-attr,index,arg-type]
    assert log.text.count("evaluate_fn gets a model with the average of the clients' BatchNorm (3 of 3 clients sent theirs)") == 1
    assert any(m.metadata.message_type == "query.kept" for m in grid.sent)


def test_without_the_clients_leave_the_log_says_why_there_is_no_global_model(log: pytest.LogCaptureFixture) -> None:
    seen: Seen = {}
    result = ran("fedbn", seen, InProcessGrid(own_app("fedbn"), CLIENTS, {}))
    assert set(seen) == {0}
    assert len(result.records) == 2
    says = "evaluate_fn is not called from round 1 on: under fedbn every client keeps its BatchNorm, so there is no global model"
    assert log.text.count(says) == 1
    assert "answer(..., tells=True)" in log.text


def test_where_nothing_is_shared_or_batch_norm_is_replaced_the_log_says_so(log: pytest.LogCaptureFixture) -> None:
    seen: Seen = {}
    ran("single", seen)
    assert set(seen) == {0}
    assert log.text.count("evaluate_fn is not called from round 1 on: under single clients share no weights") == 1
    arrays: list[ArrayRecord] = []
    strategy = OwnAppStrategy(net(), METHODS["gn"](), fraction_evaluate=0)
    strategy.start(InProcessGrid(own_app("gn"), CLIENTS, {}), num_rounds=1, evaluate_fn=lambda number, given: arrays.append(given))
    assert "since gn replaces BatchNorm: load them into fl_bn.convert(Net(), method)" in log.text
    convert(net(), METHODS["gn"]()).load_state_dict(arrays[-1].to_torch_state_dict(), strict=True)


def test_round_0_is_of_the_arrays_that_the_run_starts_with() -> None:
    seen: Seen = {}
    ran("silobn", seen, None, initial_arrays=ArrayRecord(pretrained().state_dict()))
    expected = pretrained().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in seen[0].items() if not name.endswith("tracked"))


def test_the_result_s_arrays_load_into_the_network_too() -> None:
    """As Flower's quickstart ends: ``torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")``."""
    result = FixBN(net(), fraction_evaluate=0).start(InProcessGrid(own_app("fixbn"), CLIENTS, {}), num_rounds=1)
    net(3).load_state_dict(result.arrays.to_torch_state_dict(), strict=True)


@pytest.mark.parametrize("returned", [(0.5, {"acc": 1.0}), 0.5, {"acc": 1.0}], ids=["older API", "number", "dict"])
def test_what_is_no_metric_record_is_named(returned: Any) -> None:
    strategy = OwnAppStrategy(net(), METHODS["fedavg"](), fraction_evaluate=0)
    with pytest.raises(RunFailed, match=r"evaluate_fn\(round, arrays\) must return a MetricRecord or None, but in round 0 it returned"):
        strategy.start(InProcessGrid(own_app("fedavg"), CLIENTS, {}), num_rounds=1, evaluate_fn=lambda number, arrays: returned)
