"""``BatchNormClient`` as a ``NumPyClient``: lists of arrays in, lists out, and the bits that messages carry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fl_bn import convert
from fl_bn.flower import BatchNormClient, Site
from fl_bn.flower.wire.codec import flatten, from_records
from fl_bn.methods import METHODS, Method
from tests.in_process import CPU, TWO_STEPS, Run, Samples, run
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((16, 12))


def client_of(method: Method, clients: list[Samples], index: int, tells: bool = False) -> Any:
    site = Site(index, len(clients), clients[index], clients[index], CPU, label_counts=(len(clients[index]),))
    return BatchNormClient(convert(seeded_network("cnn"), method), method, TWO_STEPS, site, RecordDict(), tells=tells)


def as_lists(message: Message) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return a message as a caller of ``NumPyClient`` has it."""
    payload, header = from_records(message.content)
    arrays, layout = flatten(payload)
    return arrays, {**vars(header), **dict(message.content.config_records["fl-bn/config"]), "layout": layout}


def asked(ran: Run, kind: str, client: int) -> tuple[Message, Message]:
    """The first message of this kind to a client, and its reply."""
    node = client + 1
    sent = next(m for m in ran.grid.sent if m.metadata.message_type == kind and m.metadata.dst_node_id == node)
    identity = sent.metadata.message_id
    return sent, next(m for m in ran.grid.received if m.metadata.reply_to_message_id == identity)


def test_evaluate_on_lists_has_the_numbers_of_an_evaluate_message(clients: list[Samples]) -> None:
    method = METHODS["fedavg"]()
    sent, reply = asked(run(method, clients, 1, policy={"at_clients": True}), "evaluate", 1)
    loss, samples, metrics = client_of(method, clients, 1).evaluate(*as_lists(sent))
    told = dict(reply.content.metric_records["fl-bn/metrics"])
    assert (loss, samples, metrics["accuracy"]) == (told["loss"], told["samples"], told["accuracy"])


def test_get_properties_says_who_the_client_is(clients: list[Samples]) -> None:
    client = client_of(METHODS["fedavg"](), clients, 1)
    said = client.get_properties({})
    assert (said["client"], said["clients"], said["samples"], said["label-counts"]) == (1, 2, 12, "[12]")
    assert said["signature"] == client.network.signature


def test_a_list_for_another_model_or_without_its_names_is_refused(clients: list[Samples]) -> None:
    method = METHODS["fedavg"]()
    ran = run(method, clients, 1)
    arrays, config = as_lists(asked(ran, "train", 0)[0])
    client = client_of(method, clients, 0)
    client.fit(arrays, config)  # control
    for wrong, field in (
        ({"signature": "0" * 16}, "header/signature"),
        ({"method": "fbn"}, "header/method"),
        ({"learning-rate": -1.0}, "config/learning-rate"),
    ):
        with pytest.raises(ValueError, match=field):
            client.fit(arrays, {**config, **wrong})
