"""What a site's own code counts in its answers, against the server's report: each method, sums, evaluations, exchanges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fl_bn.exchange import Layer, Session
from fl_bn.exchange.call import Key, Quantity
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.local import Samples
from fl_bn.federation.record import Disclosure
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support import departures
from fl_bn_site.leaving import about, answered, sections_of
from tests.deployment.inner import OTHER, GrpcExchange
from tests.in_process import run
from tests.listed import common_first

Clients = Callable[..., list[Samples]]
Counted = dict[tuple[int, str], tuple[int, int, int]]  # (client, section) -> tensors, bytes, fewest samples (0: unknown)


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((16, 12, 10))


def summed(parts: Iterable[tuple[int, str, int, int, int]]) -> Counted:
    found: Counted = {}
    for client, section, tensors, nbytes, samples in parts:
        before = found.get((client, section), (0, 0, 0))
        found[client, section] = before[0] + tensors, before[1] + nbytes, min(filter(None, (before[2], samples)), default=0)
    return found


def told(disclosures: Iterable[Disclosure]) -> Counted:
    """What the server says, summed over its kinds."""
    return summed((one.client, one.section, one.tensors, one.nbytes, one.samples) for one in disclosures)


def counted(grid: Any) -> Counted:
    """What the sites count in the answers that the server got. The exchange in one process has no messages."""
    asked, order = {m.metadata.message_id: m for m in grid.sent}, sorted({m.metadata.dst_node_id for m in grid.sent})
    return summed(
        (order.index(reply.metadata.src_node_id), section, of["tensors"], of["bytes"], of.get("samples", 0))
        for reply in grid.received
        if not reply.has_error()
        for section, of in sections_of(asked[reply.metadata.reply_to_message_id].metadata.message_type, reply.content).items()
        if section not in (OTHER, "introduction")
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", common_first(METHODS))
def test_a_site_counts_what_the_server_reports(name: str, clients: list[Samples]) -> None:
    ran = run(METHODS[name](), clients, 2, policy={"calibrate": 1, "evaluate_every": 1})
    server = told(d for record in ran.records for d in record.disclosures if d.section != "exchange")
    site = counted(ran.grid)
    assert site == server
    assert {section for _, section in site} >= ({"weights", "metrics"} if name != "single" else {"metrics"})


@pytest.mark.parametrize(
    ("method", "more", "section"),
    [("hbn", {"secure": SecureAggregation()}, "masked"), ("fedtan", {"policy": {"exchange": ExchangeSettings("replay")}}, "exchange")],
)
def test_a_site_counts_sums_and_an_exchange_by_replay(method: str, more: dict[str, Any], section: str, clients: list[Samples]) -> None:
    ran = run(METHODS[method](), clients, 2, **more)
    site, server = counted(ran.grid), told(d for record in ran.records for d in record.disclosures)
    assert (0, section) in server
    assert site == server


def test_a_vector_of_an_exchange_that_cannot_be_logged_does_not_leave() -> None:
    def refuse(*vector: object) -> None:
        raise PermissionError("the log cannot be written")

    session = Session([0], {"layer": Layer(4, torch.float32)}, policy="shrink", samples={0: 6})
    service = ExchangeService("127.0.0.1", 0, 64).start()
    heard: list[tuple[str, int, int]] = []
    with mock.patch.object(departures, "_listeners", []), ExitStack() as stack:
        stack.callback(service.stop)
        exchange = GrpcExchange(f"127.0.0.1:{service.port}", service.open(session)[0], 6)
        departures.listen(lambda *vector: heard.append(vector))
        exchange(Key("layer", Quantity.STATISTICS, 0), torch.ones(8), 6)
        assert (heard, session.traffic[0].up) == ([("exchange", 32, 6)], 32)
        departures.listen(refuse)
        with pytest.raises(PermissionError):
            exchange(Key("layer", Quantity.STATISTICS, 1), torch.ones(8), 6)
        assert session.traffic[0].up == 32
        exchange.close()


def test_what_is_no_array_of_fl_bn_s_counts_too() -> None:
    raw = Array("float32", (2,), "other.format", b"x" * 20)
    records = {"arrays": ArrayRecord({"a": Array(np.zeros(3, np.float32)), "b": raw}), "metrics": MetricRecord({"loss": 0.5, "n": 3})}
    found = sections_of("train", RecordDict({**records, "notes": ConfigRecord({"text": "häus", "many": [1, 2]})}))
    assert (found["own arrays"], found[OTHER]["bytes"]) == ({"tensors": 2, "bytes": 12 + 20}, 16 + 5 + 16)
    many = sections_of("train", RecordDict({f"a{i:03d}": ArrayRecord({"x": Array(np.zeros(1))}) for i in range(60)}))
    assert (len(many), sum(of["bytes"] for of in many.values())) == (51, 480)
    big = ArrayRecord({"x": Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x01\x00\xff\xff" + b"x" * 990)})  # it claims a long header
    for kind, names in (("evaluate", ["fl-bn/weights"]), ("train", ["fl-bn/metrics"]), ("train", ["\x1b" * 90 + "a", "\x1b" * 90 + "b"])):
        found = sections_of(kind, RecordDict({**dict.fromkeys(names, big), "fl-bn/header": ConfigRecord({"hidden": "x" * 100})}))
        assert sum(of["bytes"] for of in found.values()) == 1000 * len(names) + 100
        assert "".join(found).isprintable()


def test_what_a_line_says_of_a_message_and_its_answer() -> None:
    asked = Message(RecordDict({"fl-bn/config": ConfigRecord({"run": "night/state-0000abcd"})}), 1, "train", group_id="3")
    said = about(asked, {"method": "hbn"}, "c" * 64)
    assert [said[key] for key in ("name", "submitter", "message", "round", "method")] == ["night", None, "train", 3, "hbn"]
    flowers = Message(RecordDict({"config": ConfigRecord({"server-round": 7})}), 1, "train")
    assert about(flowers, {}, "")["round"] == 7
    failed = answered("train", Message(Error(0, "no\nway"), reply_to=asked), "refused")
    assert (failed["sections"], failed["decision"], failed["reason"]) == ({}, "refused", "no?way")


def test_a_line_has_no_value_of_the_data(clients: list[Samples]) -> None:
    """Of each answer of a run: no element of an array and no metric, however it is written."""
    ran = run(METHODS["hbn"](), clients, 1, policy={"evaluate_every": 1})
    asked = {m.metadata.message_id: m for m in ran.grid.sent}
    values, lines = set[str](), ""
    for reply in ran.grid.received:
        message = asked[reply.metadata.reply_to_message_id]
        lines += json.dumps(about(message, {}, "") | answered(message.metadata.message_type, reply))
        for record in reply.content.values():
            for value in record.values():
                elements = np.atleast_1d(value.numpy() if isinstance(value, Array) else value if isinstance(value, float) else [])
                values |= {repr(float(element))[:8] for element in elements.reshape(-1) if float(element) % 1}
    assert len(values) > 100
    assert [value for value in values if value in lines] == []
    one = min(values)
    assert [value for value in values if value in lines + one] == [one]  # control
