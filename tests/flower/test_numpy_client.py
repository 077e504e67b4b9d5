"""``BatchNormClient`` as a ``NumPyClient``: lists of arrays in, lists out, and the bits that messages carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.client import NumPyClient

from fl_bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.payload import Payload
from fl_bn.federation.schema import KEPT, kept_layers
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower import BatchNormClient, Site
from fl_bn.flower.wire.codec import flatten, from_records, unflatten
from fl_bn.methods import METHODS, Method
from fl_bn.support.wire import WireError
from tests.in_process import CPU, TWO_STEPS, Run, client_app, identical, run, sections
from tests.in_process import WatchedGrid as Grid
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((16, 12))


def client_of(method: Method, clients: list[Samples], index: int, settings: LocalTraining = TWO_STEPS, tells: bool = False) -> Any:
    site = Site(index, len(clients), clients[index], clients[index], CPU, label_counts=(len(clients[index]),))
    return BatchNormClient(convert(seeded_network("cnn"), method), method, settings, site, RecordDict(), tells=tells)


def as_lists(message: Message) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return a message as a caller of ``NumPyClient`` has it."""
    payload, header = from_records(message.content)
    arrays, layout = flatten(payload)
    return arrays, {**header.values(), **dict(message.content.config_records["fl-bn/config"]), "layout": layout}


def asked(ran: Run, kind: str, client: int) -> tuple[Message, Message]:
    """The first message of this kind to a client, and its reply."""
    node = client + 1
    sent = next(m for m in ran.grid.sent if m.metadata.message_type == kind and m.metadata.dst_node_id == node)
    identity = sent.metadata.message_id
    return sent, next(m for m in ran.grid.received if m.metadata.reply_to_message_id == identity)


def same(payload: Payload, reply: Message) -> bool:
    came = sections(reply.content)
    return payload.keys() == came.keys() and all(identical(payload[section], came[section]) for section in came)


@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn", "fedbn"])
def test_fit_on_lists_has_the_bits_of_a_train_message(name: str, clients: list[Samples]) -> None:
    method = METHODS[name]()
    ran = run(method, clients, 1)
    for index in range(2):
        sent, reply = asked(ran, "train", index)
        client = client_of(method, clients, index)
        assert isinstance(client, NumPyClient)
        arrays, samples, metrics = client.fit(*as_lists(sent))
        assert same(unflatten(arrays, str(metrics.pop("layout"))), reply)
        assert {"samples": samples, **metrics} == dict(reply.content.metric_records["fl-bn/metrics"])
    other = client_of(method, clients, 0).fit(*as_lists(asked(ran, "train", 1)[0]))
    assert not same(unflatten(other[0], other[2]["layout"]), reply)  # control: the other client's data


def test_fit_on_lists_measures_where_the_phase_says_so(clients: list[Samples]) -> None:
    method = METHODS["fbn"]()
    ran = run(method, clients, 1, policy={"calibrate": 1, "recalibration": "passes"})
    sent, reply = asked(ran, "query.statistics", 1)
    arrays, samples, metrics = client_of(method, clients, 1).fit(*as_lists(sent))
    assert same(unflatten(arrays, metrics["layout"]), reply)
    assert samples == 12


def test_fit_on_lists_in_two_bytes_a_number(clients: list[Samples]) -> None:
    method = METHODS["fedavg"]()
    ran = run(method, clients, 1, policy={"payload": "bfloat16"})
    sent, reply = asked(ran, "train", 0)
    arrays, _, metrics = client_of(method, clients, 0).fit(*as_lists(sent))
    assert same(unflatten(arrays, metrics["layout"]), reply)
    assert {array.dtype for array in arrays} >= {np.dtype("uint16")}


def test_evaluate_on_lists_has_the_numbers_of_an_evaluate_message(clients: list[Samples]) -> None:
    method = METHODS["fedavg"]()
    ran = run(method, clients, 1, policy={"at_clients": True})
    sent, reply = asked(ran, "evaluate", 1)
    loss, samples, metrics = client_of(method, clients, 1).evaluate(*as_lists(sent))
    told = dict(reply.content.metric_records["fl-bn/metrics"])
    assert (loss, samples, metrics["accuracy"]) == (told["loss"], told["samples"], told["accuracy"])


def test_what_a_client_keeps_is_the_same_by_lists_and_by_messages(clients: list[Samples]) -> None:
    """Round 2 goes on from what round 1 kept."""
    method = METHODS["fedbn"]()
    ran = run(method, clients, 2)
    client = client_of(method, clients, 0, tells=True)
    for message in [m for m in ran.grid.sent if m.metadata.message_type == "train" and m.metadata.dst_node_id == 1]:
        arrays, _, metrics = client.fit(*as_lists(message))
    (reply,) = [m for m in ran.grid.received if m.metadata.reply_to_message_id == message.metadata.message_id]
    assert same(unflatten(arrays, metrics["layout"]), reply)
    kept = client.get_parameters({"round": 2})
    names = list(kept_layers(client.model, method).sections[KEPT])
    ours = ran.grid.states()[0].array_records["fl-bn/local"]
    assert identical(dict(zip(names, kept, strict=True)), {name: ours[name].numpy() for name in names})
    with pytest.raises(PermissionError, match="does not share the layers that it keeps"):
        client_of(method, clients, 0).get_parameters({"round": 1})


def test_get_properties_says_who_the_client_is(clients: list[Samples]) -> None:
    client = client_of(METHODS["fedavg"](), clients, 1)
    said = client.get_properties({})
    assert (said["client"], said["clients"], said["samples"], said["label-counts"]) == (1, 2, 12, "[12]")
    assert said["signature"] == client.signature


def test_a_list_for_another_model_or_without_its_names_is_refused(clients: list[Samples]) -> None:
    method = METHODS["fedavg"]()
    ran = run(method, clients, 1)
    arrays, config = as_lists(asked(ran, "train", 0)[0])
    client = client_of(method, clients, 0)
    client.fit(arrays, config)  # control
    for wrong, said in (
        ({"signature": "0" * 16}, "header/signature: expected"),
        ({"method": "fbn"}, "header/method: expected"),
        ({"layout": "[]"}, "layout: expected 0 arrays"),
        ({"learning-rate": -1.0}, "config/learning-rate: expected"),
    ):
        with pytest.raises(WireError, match=said):
            client.fit(arrays, {**config, **wrong})


def test_a_client_app_makes_no_list(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*args: Any) -> Any:
        raise AssertionError("a list")

    for name in ("fit", "evaluate", "get_parameters", "get_properties"):
        monkeypatch.setattr(BatchNormClient, name, no)
    method = METHODS["fedbn"]()
    grid = Grid(client_app(method, clients, tells=True), 2)
    ran = run(method, clients, 1, grid=grid, policy={"unseen": True})
    assert len(ran.records[0].accepted) == 2
    assert torch.is_tensor(next(iter(ran.strategy.unseen.values())))
