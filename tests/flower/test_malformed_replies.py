"""Replies of strangers, second and malformed ones: none is averaged, nothing is unpickled, and none stays in memory."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict

from fl_bn.federation.replies import REPLIED, Expected
from fl_bn.federation.schema import Schema, Spec
from fl_bn.flower import InProcessGrid
from fl_bn.flower.wire.codec import LazyArray
from fl_bn.flower.wire.messaging import Reading, decode
from fl_bn.methods import METHODS
from tests.flower.byzantine import OneRound, equal_clients, taken_apart
from tests.flower.inside import Client, Header, to_records
from tests.hostile.liars import people
from tests.in_process import client_app, identical, run
from tests.scripts import script

CLIENTS = 5


def test_strangers_second_replies_and_another_header_are_ignored() -> None:
    one = OneRound("fbn", equal_clients(CLIENTS))
    expected = one.served().tensors
    again, other = taken_apart(one.replies[0]), taken_apart(one.replies[1])
    again.payload["weights"]["9.bias"] += 1
    other.header["round"] = 9
    second, stranger = (Message(again.content(), reply_to=one.messages[0]) for _ in range(2))
    stranger.metadata.__dict__["_src_node_id"] = 999
    with_second = one.combined([stranger, *one.replies, second])
    assert identical(with_second.tensors, expected)
    assert not identical(one.combined([second, *one.replies[1:]]).tensors, expected)  # control: the first one counts
    late = one.combined([one.replies[0], Message(other.content(), reply_to=one.messages[1]), *one.replies[2:]])
    assert late.refused[1].startswith("header/round")


def test_nothing_a_reply_brings_is_unpickled() -> None:
    """An object array would run code when unpickled: here it would end the test."""
    one = OneRound("fedbn", equal_clients(CLIENTS))
    target = io.BytesIO()
    np.save(target, np.array([Bomb()], dtype=object), allow_pickle=True)
    reply = taken_apart(one.replies[0])
    reply.raw["weights", "9.bias"] = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=target.getvalue())
    bomb = Message(reply.content(), reply_to=one.messages[0])
    assert "weights/9.bias" in one.combined([bomb, *one.replies[1:]]).refused[0]
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


# How many replies are in memory at once

MANY = 12


class Alive(InProcessGrid):
    """Counts how many replies' weights are in memory when a client has computed another."""

    def __init__(self) -> None:
        super().__init__(client_app(METHODS["fbn"](), people(MANY)), MANY, {})
        self.weights, self.most = list[weakref.ref[Any]](), 0

    def _answer(self, message: Message) -> Message:
        answer = super()._answer(message)
        if message.metadata.message_type == "train":
            record: Any = answer.content["fl-bn/weights"]
            self.weights.append(weakref.ref(next(iter(record.values())).array))
            self.most = max(self.most, sum(one() is not None for one in self.weights))
        return answer


class AllAtOnce(Alive):
    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        return iter(self.pull_messages(self.push_messages(messages)))


def test_in_one_process_a_reply_is_gone_before_the_next_but_few_is_computed() -> None:
    ran = {}
    for kind in (Alive, AllAtOnce):
        gc.collect()
        gc.disable()
        try:
            grid = kind()
            trajectory = run(METHODS["fbn"](), people(MANY), 2, grid=grid).trajectory  # type: ignore[arg-type]
        finally:
            gc.enable()
        assert len(grid.weights) == 2 * MANY
        ran[kind] = grid.most, trajectory
    assert ran[Alive][0] <= 2
    assert ran[AllAtOnce][0] == MANY  # control
    assert all(identical(ran[Alive][1][round], ran[AllAtOnce][1][round]) for round in (1, 2))
