"""A thousand malformed replies: none is averaged, each is named in the record and in the log, and the rounds go on."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.schema import Schema, Spec
from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.wire.codec import LazyArray
from fl_bn.flower.wire.messaging import Reading, decode
from fl_bn.methods import METHODS, Method
from tests.federation import random_samples
from tests.flower.inside import Client, Header, Samples, arrays_record, to_records
from tests.flower.malformed import taken_apart
from tests.in_process import WatchedGrid, arrays_of, client_app, identical
from tests.networks import seeded_network
from tests.scripts import script

CLIENTS = 5


class Harness:
    """Two servers of one population: ``strategy`` is told what clients answer, ``alone`` hears one honest reply of them."""

    def __init__(self, method: Method, clients: list[Samples]) -> None:
        rounds = Rounds(len(clients), min_replies=0.2, wait=0.0)
        self.strategy, self.alone = (BatchNormStrategy(seeded_network("cnn"), method, rounds).transport for _ in range(2))
        self.grid = WatchedGrid(client_app(method, clients), len(clients))
        self.arrays = arrays_record(self.strategy.shared.tensors())

    def instructions(self, round: int) -> list[Message]:
        if round == 1:
            self.alone.meet(self.grid)
            self.strategy.meet(self.grid)
        self.alone.ask_to_train(round, self.arrays, {})
        return self.strategy.ask_to_train(round, self.arrays, {})

    def answer(self, instruction: Message) -> Message:
        (reply,) = self.grid.send_and_receive([instruction])
        return reply


@pytest.fixture
def clients() -> list[Samples]:
    return [random_samples(6, seed=i) for i in range(CLIENTS)]


def test_strangers_and_second_replies_are_ignored(clients: list[Samples]) -> None:
    harness = Harness(METHODS["fbn"](), clients)
    messages = harness.instructions(1)
    replies = [harness.answer(message) for message in messages]
    expected, _ = harness.alone.combine(1, replies)
    again = taken_apart(replies[0])
    again.payload["weights"]["9.bias"] += 1
    second = Message(again.content(), reply_to=messages[0])
    stranger = Message(again.content(), reply_to=messages[0])
    stranger.metadata.__dict__["_src_node_id"] = 999
    after, _ = harness.strategy.combine(1, [stranger, *replies, second])
    assert expected is not None
    assert after is not None
    assert identical(arrays_of(after), arrays_of(expected))
    changed, _ = harness.alone.combine(1, [second, *replies[1:]])  # control: the first one counts
    assert changed is not None
    assert not identical(arrays_of(changed), arrays_of(expected))


def test_nothing_a_reply_brings_is_unpickled(clients: list[Samples]) -> None:
    """An object array would run code when unpickled: here it would end the test."""
    harness = Harness(METHODS["fedbn"](), clients)
    (message, *_) = harness.instructions(1)
    reply = taken_apart(harness.answer(message))
    target = io.BytesIO()
    np.save(target, np.array([Bomb()], dtype=object), allow_pickle=True)
    reply.raw["weights", "9.bias"] = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=target.getvalue())
    harness.strategy.combine(1, [Message(reply.content(), reply_to=message)])
    assert "weights/9.bias" in harness.strategy.record.clients[0].refused
    with pytest.raises(AssertionError):
        np.load(io.BytesIO(target.getvalue()), allow_pickle=True)  # control: it is a bomb


def explode() -> None:
    raise AssertionError("unpickled")


class Bomb:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


# A reply is decoded once, whatever it holds, and nothing of it stays in memory when it is refused

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
    return Reading([CLIENT], HEADER, Expected(3, "0123", Schema({"weights": specs}), REPLIED))


def test_a_reply_is_passed_on_at_most_four_times_on_each_side() -> None:
    sides = [side for side, _ in script("benchmarks/walk.py").walked("fedavg").returns]
    assert 3 <= sides.count("client") <= 3 * 4  # three clients
    assert 3 <= sides.count("server") <= 3 * 4


def test_what_can_be_read_is_and_of_the_rest_the_bytes_are_known() -> None:
    whole = decode(reply(content()))
    assert (whole.node, whole.header, whole.problem) == (7, HEADER, None)
    made = content()
    made["fl-bn/weights"]["a"] = NOISE
    made["fl-bn/more"] = to_records({"more": {"c": np.zeros(4)}}, HEADER)["fl-bn/more"]
    half = decode(reply(made))
    assert {section: sorted(arrays) for section, arrays in half.payload.items()} == {"weights": ["b"], "more": ["c"]}
    assert str(half.problem).startswith("weights/a: expected a NumPy array, but its bytes cannot be read")


@pytest.mark.sample("[header", "[nothing")
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
        found = checks.parts.pop(checks.read(decoded), None)
        del made, decoded
        assert (arrays() is None) == (found is None)
        assert bool(checks.refused) == (wrong != "nothing")
        del found
        assert arrays() is None
    finally:
        gc.enable()
