"""What is the user's stays the user's: keys of configs, records of messages, metrics and ``context.state``; Flower's arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fl_bn.flower import FBN, HBN, FedAvgBN, FedBN, InProcessGrid, SiloBN
from fl_bn.flower.app.client_state import MemoryState
from fl_bn.flower.wire.fields import OURS
from fl_bn.flower.wire.versions import OtherVersion, check_server, introduction_of
from fl_bn.methods import METHODS
from fl_bn.support.wire import WireError
from tests.flower.own_apps import CLIENTS, config, net, own_app, pretrained
from tests.in_process import WatchedGrid
from tests.listed import listed


def test_the_user_s_config_comes_through_untouched() -> None:
    seen: list[dict[str, Any]] = []

    def note(message: Message, context: Context) -> None:
        seen.append(dict(message.content["config"]))  # type: ignore[call-overload]

    mine = {"learning-rate": 0.05, "run": "mine", "version": "v2", "save": "here", "counted": 3, "exchange": "x"}
    strategy = FedBN(net())
    grid = InProcessGrid(own_app("fedbn", before=note), CLIENTS, {})
    strategy.start(grid, num_rounds=2, train_config=ConfigRecord(dict(mine)), evaluate_config=ConfigRecord({"run": "eval"}))
    trained, evaluated = [s for s in seen if "learning-rate" in s], [s for s in seen if "learning-rate" not in s]
    assert trained == [{**mine, "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]
    assert evaluated == [{"run": "eval", "server-round": round} for round in (1, 2) for _ in range(CLIENTS)]


def test_the_config_s_record_has_the_name_that_the_user_gives_it() -> None:
    grid = WatchedGrid(own_app("fedavg", rate=lambda message: float(message.content["mine"]["lr"])), CLIENTS)  # type: ignore[arg-type,call-overload,index]
    FedAvgBN(net(), configrecord_key="mine", fraction_evaluate=0).start(grid, num_rounds=1, train_config=config(lr=0.05))
    (message, *_) = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert dict(message.content["mine"]) == {"lr": 0.05, "server-round": 1}  # type: ignore[call-overload]
    assert "config" not in message.content


def test_every_record_of_fl_bn_has_its_prefix() -> None:
    grid = WatchedGrid(own_app("hbn"), CLIENTS)

    HBN(net()).start(grid, num_rounds=2)
    others = {(m.metadata.message_type, name) for m in grid.sent for name in m.content if not name.startswith(OURS)}
    assert others == {("train", "config"), ("evaluate", "config")}
    others = {(m.metadata.message_type, name) for m in grid.received for name in m.content if not name.startswith(OURS)}
    assert others == {("train", "metrics"), ("evaluate", "metrics")}
    assert all(name.startswith(OURS) for state in grid.states() for name in state)


def test_records_of_one_s_own_in_the_state_of_a_client_stay() -> None:
    """FedBN's BatchNorm is not replaced by a record ``local`` of the app's own, nor the other way round."""

    def note(message: Message, context: Context) -> None:
        counts = context.state.config_records.get("kept-for", {})
        context.state["kept-for"] = ConfigRecord({"mine": int(counts.get("mine", 0)) + 1})  # type: ignore[arg-type]
        context.state["local"] = ArrayRecord({"head": _array(float(counts.get("mine", 0)))})  # type: ignore[arg-type]

    grid, plain = WatchedGrid(own_app("fedbn", before=note), CLIENTS), WatchedGrid(own_app("fedbn"), CLIENTS)
    for one in (grid, plain):
        FedBN(net(), fraction_evaluate=0).start(one, num_rounds=3)
    for state, other in zip(grid.states(), plain.states(), strict=True):
        assert state["kept-for"]["mine"] == 3  # type: ignore[call-overload,index]
        assert float(state["local"]["head"].numpy()) == 2.0  # type: ignore[call-overload,index,union-attr]
        ours, theirs = state["fl-bn/local"], other["fl-bn/local"]
        assert all((ours[name].numpy() == theirs[name].numpy()).all() for name in theirs)  # type: ignore[union-attr,index]
        assert not torch.equal(torch.from_numpy(ours["1.running_mean"].numpy().copy()), net()[1].running_mean)  # type: ignore[union-attr,index,arg-type]


def _array(value: float) -> Any:

    return Array(torch.tensor(value).numpy())


def test_state_of_an_earlier_version_is_not_used_and_is_said(log: pytest.LogCaptureFixture) -> None:
    old = RecordDict({"kept-for": ConfigRecord({"signature": "a", "round": 3}), "local": ArrayRecord({"w": _array(1.0)})})
    assert MemoryState(old, "a").read(5).round == 0
    assert "an older version of fl-bn stored this client's tensors, in records without the prefix fl-bn/" in log.text
    assert set(old) == {"kept-for", "local"}  # it may be the user's
    log.clear()
    assert MemoryState(RecordDict({"kept-for": ConfigRecord({"mine": 1})}), "a").read(5).round == 0
    assert not log.text  # control: a record of one's own of this name


def test_messages_of_an_earlier_version_are_refused_by_name() -> None:
    greeting = Message(RecordDict({"config": ConfigRecord({"version": "0.0.1"})}), 1, "query.hello")
    header = Message(RecordDict({"header": ConfigRecord({"format": "fl-bn/1"}), "config": ConfigRecord({"lr": 0.1})}), 1, "train")
    for message in (greeting, header):
        with pytest.raises(OtherVersion, match="an earlier one, whose records have no names that begin with 'fl-bn/'"):
            check_server(message)
    check_server(Message(RecordDict({"header": ConfigRecord({"mine": 1}), "config": ConfigRecord({"lr": 0.1})}), 1, "train"))  # control
    with pytest.raises(WireError, match="and the client an earlier one, whose records have no names that begin with 'fl-bn/'"):
        introduction_of(RecordDict({"hello": ConfigRecord({"client": 0})}))


# the arguments of Flower's FedAvg


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fraction_train": ({"fraction_train": 0.0}, r"fraction_train must be in \(0, 1\], but got 0.0"),
    "fraction_evaluate": ({"fraction_evaluate": 1.5}, r"fraction_evaluate must be 0 \(nobody evaluates\) .. 1"),
    "min_train_nodes": ({"min_train_nodes": 0}, "min_train_nodes must be a whole number >= 1, but got 0"),
    "min_evaluate_nodes": ({"min_evaluate_nodes": -1}, "min_evaluate_nodes must be a whole number >= 0, but got -1"),
    "min_available_nodes": ({"min_available_nodes": 1.5}, "min_available_nodes must be a whole number >= 1, but got 1.5"),
    "arrayrecord_key": ({"arrayrecord_key": "model"}, "arrayrecord_key must stay 'arrays', but got 'model': fl-bn sends tensors"),
    "configrecord_key": ({"configrecord_key": "fl-bn/config"}, "configrecord_key must be a name that does not begin with 'fl-bn/'"),
    "weighted_by_key": ({"weighted_by_key": ""}, "weighted_by_key must be the name of a metric"),
    "train_metrics_aggr_fn": ({"train_metrics_aggr_fn": 3}, "train_metrics_aggr_fn must be a function"),
    "evaluate_metrics_aggr_fn": ({"evaluate_metrics_aggr_fn": 3}, "evaluate_metrics_aggr_fn must be a function"),
}


@listed("case", REFUSED)
def test_an_argument_that_cannot_work_is_refused_by_name(case: str) -> None:
    options, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        FBN(net(), **options)


@pytest.mark.parametrize(("fraction", "least", "number"), [(0.5, 1, 2), (0.5, 3, 3), (0.1, 0, 0), (0.34, 0, 1), (1.0, 2, 3), (0.0, 2, 0)])
def test_any_share_of_the_clients_evaluates(fraction: float, least: int, number: int) -> None:
    grid = WatchedGrid(own_app("fedavg"), CLIENTS)
    result = FedAvgBN(net(), fraction_evaluate=fraction, min_evaluate_nodes=least).start(grid, num_rounds=4)
    by_round = [
        {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate" and m.metadata.group_id == str(round)}
        for round in range(1, 5)
    ]
    assert [len(nodes) for nodes in by_round] == [number] * 4
    assert set(result.evaluate_metrics_clientapp) == (set(range(1, 5)) if number else set())
    if number == 2:
        assert len({frozenset(nodes) for nodes in by_round}) > 1  # not the same ones in every round


def test_more_nodes_than_there_are_is_said(log: pytest.LogCaptureFixture) -> None:
    FedAvgBN(net(), min_train_nodes=9, fraction_evaluate=0).start(InProcessGrid(own_app("fedavg"), CLIENTS, {}), num_rounds=1)
    assert "min_train_nodes is 9, but there are 3 clients: all of them take part in every round" in log.text


def test_pretrained_arrays_are_where_a_client_s_own_layers_begin() -> None:
    for strategy in (FedBN, SiloBN):
        grid = WatchedGrid(own_app(strategy.of), CLIENTS)
        arrays = ArrayRecord(pretrained().state_dict())
        strategy(net(), fraction_evaluate=0).start(grid, arrays, num_rounds=1)
        sent = next(m for m in grid.sent if m.metadata.message_type == "train")
        start = {name: array.numpy() for name, array in sent.content["fl-bn/start"].items()}  # type: ignore[union-attr]
        assert all((value == pretrained().state_dict()[name].numpy()).all() for name, value in start.items())
        assert "1.running_mean" in start


def test_the_application_s_strategy_starts_clients_from_them_too() -> None:
    from fl_bn.federation.local import Samples
    from fl_bn.flower import FedBNStrategy, Rounds
    from tests.flower.own_apps import data
    from tests.in_process import client_app

    clients = [Samples(torch.cat([x for x, _ in data(i)]), torch.cat([y for _, y in data(i)])) for i in range(CLIENTS)]
    given, built = (
        WatchedGrid(client_app(METHODS["fedbn"](), clients, model=model), CLIENTS) for model in (net(), pretrained())
    )
    FedBNStrategy(net(), Rounds(CLIENTS)).start(given, ArrayRecord(pretrained().state_dict()), num_rounds=2)
    FedBNStrategy(pretrained(), Rounds(CLIENTS)).start(built, num_rounds=2)
    for one, other in zip(given.states(), built.states(), strict=True):
        ours, theirs = one["fl-bn/local"], other["fl-bn/local"]
        assert all((ours[name].numpy() == theirs[name].numpy()).all() for name in theirs)  # type: ignore[union-attr,index]


def test_arrays_of_another_network_are_refused() -> None:
    other = {**net().state_dict(), "0.bias": torch.zeros(9)}
    with pytest.raises(ValueError, match=r"initial_arrays: 0.bias has shape \(9,\), but the strategy's network has shape \(6,\)"):
        FedBN(net()).start(InProcessGrid(own_app("fedbn"), CLIENTS, {}), ArrayRecord(other), num_rounds=1)
    lacking = {name: tensor for name, tensor in net().state_dict().items() if name != "0.bias"}
    with pytest.raises(ValueError, match="initial_arrays lack '0.bias'"):
        FedBN(net()).start(InProcessGrid(own_app("fedbn"), CLIENTS, {}), ArrayRecord(lacking), num_rounds=1)
