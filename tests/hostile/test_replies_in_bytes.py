"""A client that does not run Flower's SuperNode chooses the bytes of its reply, which Flower opens in the server's process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flwr.app import Message, RecordDict

from tests.hostile.liars import LIAR, what
from tests.hostile.recorded import CLIENTS, Liar, PlayingGrid, recorded, served
from tests.listed import listed
from tools.hostile.mutations import fields_of, opened, put_together
from tools.hostile.outcomes import listening
from tools.hostile.transport import ByteGrid

pytestmark = pytest.mark.pinned

Change = Callable[[str, bytes], bytes]  # of an object's kind and its body
OTHER = 4  # the node that a liar says it is
SOURCE = 3  # the field of Flower's Metadata that tells the sender


class Spoils(Liar):
    """Send other bytes in the replies to ``asked``."""

    def __init__(self, asked: str, change: Change) -> None:
        self.asked, self.change, self.spoilt = asked, change, list[Message]()

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
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


def others_only(asked: str, change: Change) -> list[str]:
    """Run a round of such a liar, which every other client takes part in; return what the server's log says."""
    liar = Spoils(asked, change)
    with listening() as said:
        record = served("fbn", ByteGrid(PlayingGrid(recorded("fbn"), liar), liar)).record
    assert liar.spoilt  # it was sent
    assert record.aggregated
    assert [c.client for c in record.accepted if c.client != LIAR] == [client for client in range(CLIENTS) if client != LIAR]
    assert not any(c.refused for c in record.clients if c.client != LIAR)
    assert not any("\n" in line or len(line) > 2000 for line in said.lines)
    return said.lines


UNREADABLE = {
    "a dict of arrays that nests": ("ArrayRecord", b"[" * 100_000),
    "an array's description without a shape": ("Array", b'{"dtype": "float32", "stype": "numpy.ndarray"}'),
    "records that are no records": ("RecordDict", b'{"weights": []}'),
    "a message that is no protobuf": ("Message", b"\x0a\xff"),
}


CASES = [(case, asked) for asked in ("query.hello", "query.statistics", "train") for case in UNREADABLE]


@listed(("case", "asked"), [case for case in CASES if case[1] != "query.hello" or "array" not in case[0]])  # it has none
def test_a_reply_that_flower_cannot_open_costs_its_sender_alone(case: str, asked: str) -> None:
    kind, new = UNREADABLE[case]
    said = others_only(asked, lambda one, body: new if one == kind else body)
    assert any(f"node {LIAR + 1}" in line or f"client {LIAR}" in line for line in said), said


def from_another(kind: str, body: bytes) -> bytes:
    """Change the sender in a message's own protobuf."""
    fields = fields_of(body) if kind == "Message" else None
    if fields is None:
        return body
    changed = []
    for number, wire, value in fields:
        metadata = fields_of(value) if number == 1 else None
        new = value if metadata is None else put_together([(SOURCE, 0, OTHER) if one[0] == SOURCE else one for one in metadata])
        changed.append((number, wire, new))
    return put_together(changed)


@listed("asked", ["query.hello", "train", "evaluate"])
def test_a_reply_that_says_it_is_another_node_s_is_not_taken_for_that_one_s(asked: str) -> None:
    """Flower reads the sender of a reply from bytes that the client made: the other's own reply was then thrown away."""
    said = others_only(asked, from_another)
    assert any(f"node {OTHER}" in line for line in said), said
    assert not any(f"node {OTHER}" in line for line in others_only(asked, lambda kind, body: body))  # control
