"""From Flower's replies to checked contributions in client order; what is wrong is named and left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from flwr.app import Message, RecordDict

from fl_bn.federation.narrow import EXACT, PayloadDtype
from fl_bn.federation.replies import Expected
from fl_bn.federation.values import Reply
from fl_bn.flower.population import Client
from fl_bn.flower.wire.codec import Header, from_records
from fl_bn.flower.wire.fields import metrics_of
from fl_bn.support.wire import Absent, WireError, reason

Read = Callable[[RecordDict, Client], Reply]
"""Make the checked reply of a client from what its message holds. Raises WireError."""


def with_header(header: Header, expected: Expected, rounding: PayloadDtype = EXACT) -> Read:
    """Read replies that repeat ``header``. ``rounding``: how they carry weights and gradients."""
    return partial(_read, header, expected, rounding)


def _read(header: Header, expected: Expected, rounding: PayloadDtype, content: RecordDict, client: Client) -> Reply:
    payload, came = from_records(content)
    header.check(came)
    values = expected.numbers(client.index, metrics_of(content))
    return expected.reply(client.index, values, rounding.widen(payload))


class Reading:
    """Reads a round's replies, message by message. ``refused``: why a client's is not usable, by index; ``wrong``: those among the refused
    whose reply no correct client would have sent.

    Replies with samples 0 (a client that sat out), errors, and late or missing ones count as refused, with the reason.
    ``read``: what a message holds. ``sent``: the messages replied to, since Flower itself answers for a node that is gone, and does not say
    for which.
    """

    def __init__(self, cohort: Sequence[Client], read: Read, sent: Iterable[Message] = ()) -> None:
        self._cohort, self._content = cohort, read
        self._by_node, self._sent, self._read = {client.node: client for client in cohort}, sent, set[int]()
        self.refused: dict[int, str] = {}
        self.wrong: set[int] = set()

    def read(self, message: Message) -> int | Reply | None:
        """The reply, or the index of a client whose reply is refused; None where nothing was asked, or not again."""
        node = message.metadata.src_node_id
        if node not in self._by_node and message.has_error():
            asked = message.metadata.reply_to_message_id
            node = next((m.metadata.dst_node_id for m in self._sent if m.metadata.message_id == asked), node)
        client = self._by_node.get(node)
        if client is None or client.index in self._read:
            return None
        self._read.add(client.index)
        try:
            if message.has_error():
                raise Absent("error", "", f"code {message.error.code}: {reason(message.error.reason)}")
            return self._content(message.content, client)
        except Absent as error:
            self.refused[client.index] = str(error)
        except WireError as error:
            self.refused[client.index] = str(error)
            self.wrong.add(client.index)
        return client.index

    def end(self) -> None:
        """No more replies come: the other clients count as refused."""
        self.refused |= {c.index: "no reply before the deadline" for c in self._cohort if c.index not in self._read}


def read_replies(replies: Iterable[Message], reading: Reading) -> tuple[list[Reply], dict[int, str], set[int]]:
    """``(contributions in client order, reason by client index, who was wrong)``: every client of the cohort is in one of the first two."""
    found = [reply for message in replies if isinstance(reply := reading.read(message), Reply)]
    reading.end()
    return sorted(found, key=lambda reply: reply.client), reading.refused, reading.wrong
