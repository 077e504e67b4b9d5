"""A reply is decoded once, whatever it holds, and nothing of it stays in memory when it is refused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.schema import Schema, Spec
from fl_bn.flower.wire.codec import LazyArray
from fl_bn.flower.wire.replies import Reading, decode, with_header
from tests.flower.inside import Client, Header, to_records
from tests.scripts import script

HEADER = Header("fedavg", "train", 3, "0123")
CLIENT = Client(index=4, node=7, samples=9)
NOISE = Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"spam")


def reply(content: RecordDict) -> Message:
    message = Message(content, 7, "train")
    message.metadata.__dict__.update(_src_node_id=7, _message_id="a")
    return message


def content(header: Header | None = HEADER) -> RecordDict:
    made = to_records({"weights": {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}}, HEADER)
    if header is None:
        made["fl-bn/header"] = ConfigRecord({"round": 3})
    made["fl-bn/metrics"] = MetricRecord({"samples": 9})
    return made


def reading() -> Reading:
    specs = {name: Spec((size,), "float32") for name, size in (("a", 3), ("b", 2))}
    return Reading([CLIENT], with_header(HEADER, Expected(3, "0123", Schema({"weights": specs}), REPLIED)))


def test_a_walk_through_a_round_meets_each_header_once() -> None:
    walk = script("benchmarks/walk.py").walked("fedavg")
    assert walk.headers == {"client": 3, "server": 3}  # three clients
    assert len(walk.returns) < 3 * 24


def test_what_can_be_read_is_and_of_the_rest_the_bytes_are_known() -> None:
    whole = decode(reply(content()))
    assert (whole.node, whole.header, whole.problem, dict(whole.unreadable)) == (7, HEADER, None, {})
    made = content()
    made["fl-bn/weights"]["a"] = NOISE
    made["fl-bn/more"] = to_records({"more": {"c": np.zeros(4)}}, HEADER)["fl-bn/more"]
    half = decode(reply(made))
    assert {section: sorted(arrays) for section, arrays in half.payload.items()} == {"weights": ["b"], "more": ["c"]}
    assert half.unreadable == {"weights": {"a": 4}}
    assert str(half.problem).startswith("weights/a: expected a NumPy array, but its bytes cannot be read")


@pytest.mark.parametrize("wrong", ["bytes", "header", "dtype", "nothing"])
def test_a_reply_is_gone_from_memory_once_it_was_read(wrong: str) -> None:
    made = content(None if wrong == "header" else HEADER)
    if wrong == "bytes":
        made["fl-bn/weights"]["b"] = NOISE
    if wrong == "dtype":
        made["fl-bn/weights"]["b"] = LazyArray(np.ones(2))
    arrays = weakref.ref(made["fl-bn/weights"]["a"].array)
    checks = reading()
    gc.collect()
    gc.disable()
    try:
        decoded = decode(reply(made))
        found = checks.read(decoded)
        del made, decoded
        assert (arrays() is None) == (found == 4)
        assert bool(checks.refused) == (wrong != "nothing")
        del found
        assert arrays() is None
    finally:
        gc.enable()
