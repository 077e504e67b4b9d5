"""A client that does not run Flower's SuperNode chooses the bytes of its reply, which Flower opens in the server's process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flwr.app import Message

from tests.hostile.liars import LIAR, what
from tests.hostile.recorded import CLIENTS, Liar, PlayingGrid, Served, recorded, served
from tests.listed import listed
from tools.hostile.mutations import Field, fields_of, opened, put_together
from tools.hostile.outcomes import Said, listening
from tools.hostile.transport import ByteGrid

pytestmark = pytest.mark.pinned

Change = Callable[[str, bytes], bytes]  # of an object's kind and its body
OTHER = 4  # the node that a liar says it is
SOURCE = 3  # the field of Flower's Metadata that tells the sender


class Spoils(Liar):
    """Its reply to ``asked`` has other bytes."""

    def __init__(self, asked: str, change: Change) -> None:
        self.asked, self.change, self.spoilt = asked, change, list[Message]()

    def answer(self, message: Message, turn: int, asked: str, content):  # type: ignore[no-untyped-def]
        reply = super().answer(message, turn, asked, content)
        if what(message) == self.asked:
            self.spoilt.append(reply)
        return reply

    def delivered(self, reply: Message) -> Message:
        return opened(reply, self.changed) if any(reply is one for one in self.spoilt) else reply

    def changed(self, contents: dict[str, bytes]) -> None:
        for name, content in list(contents.items()):
            head, _, body = content.partition(b"\x00")
            kind, children, _ = head.decode().split(" ")
            new = self.change(kind, body)
            contents[name] = f"{kind} {children} {len(new)}".encode() + b"\x00" + new


def ran(asked: str, change: Change) -> tuple[Served, Said, Spoils]:
    liar = Spoils(asked, change)
    with listening() as said:
        return served("fbn", ByteGrid(PlayingGrid(recorded("fbn"), liar), liar)), said, liar


def of(kind: str, new: bytes) -> Change:
    return lambda one, body: new if one == kind else body


def metadata(number: int, value: Field) -> Change:
    """The message's own protobuf, with another field of its metadata."""

    def change(kind: str, body: bytes) -> bytes:
        if kind != "Message":
            return body
        fields = fields_of(body)
        assert fields is not None
        changed = []
        for field in fields:
            inner = fields_of(field[2]) if field[0] == 1 else None
            changed.append(field if inner is None else (1, 2, put_together([value if one[0] == number else one for one in inner])))
        return put_together(changed)

    return change


UNREADABLE = {
    "a dict of arrays that nests": of("ArrayRecord", b"[" * 100_000),
    "a dict of arrays that is none": of("ArrayRecord", b"null"),
    "an array's description without a shape": of("Array", b'{"dtype": "float32", "stype": "numpy.ndarray"}'),
    "records that are no records": of("RecordDict", b'{"weights": []}'),
    "metrics that are no protobuf": of("MetricRecord", b"\xff\xff\xff"),
    "a message that is no protobuf": of("Message", b"\x0a\xff"),
}


@listed("asked", ["query.hello", "query.statistics", "train", "evaluate"])
@listed("change", UNREADABLE)
def test_a_reply_that_flower_cannot_open_costs_its_sender_alone(change: str, asked: str) -> None:
    if (asked == "query.hello" and ("array" in change or "metrics" in change)) or (asked == "evaluate" and "array" in change):
        return  # it has none
    run, said, liar = ran(asked, UNREADABLE[change])
    assert liar.spoilt  # control: it was sent
    assert run.record.aggregated
    assert [c.client for c in run.record.accepted if c.client != LIAR] == [client for client in range(CLIENTS) if client != LIAR]
    assert any(f"node {LIAR + 1}" in line or f"client {LIAR}" in line for line in said.lines), said.lines
    assert not any("\n" in line or len(line) > 2000 for line in said.lines)


@listed("asked", ["query.hello", "train", "evaluate"])
def test_a_reply_that_says_it_is_another_node_s_is_not_taken_for_that_one_s(asked: str) -> None:
    """Flower reads the sender of a reply from bytes that the client made: the other's own reply was then thrown away."""
    run, said, _ = ran(asked, metadata(SOURCE, (SOURCE, 0, OTHER)))
    assert [c.client for c in ran(asked, lambda kind, body: body)[0].record.accepted] == list(range(CLIENTS))  # control
    others = [client for client in range(CLIENTS) if client != LIAR]
    assert [c.client for c in run.record.accepted if c.client != LIAR] == others
    assert [c.client for c in run.record.clients if c.refused and c.client != LIAR] == []
    assert any(f"node {OTHER}" in line for line in said.lines), said.lines
