"""Convert Flower's replies to checked ``Reply`` objects in client order. Each reply is decoded once, and a faulty reply is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fl_bn.federation.payload import Payload
from fl_bn.federation.replies import Expected
from fl_bn.federation.values import Reply
from fl_bn.flower.population import Client
from fl_bn.flower.wire.codec import Header, decoded, header_of
from fl_bn.flower.wire.messages import our_records, their_records
from fl_bn.support.wire import Absent, WireError, reason


@dataclass(frozen=True)
class Decoded:
    """Hold a reply that is decoded but not yet checked.

    Attributes:
        node: the node that sent it.
        failed: the error that came instead of content, in words. Empty if there is content.
        header: the header. None if it cannot be read. Then the arrays are not decoded either.
        payload: the readable arrays by section and name. They share the memory of the message.
        metrics: fl-bn's metric record. None if there is none.
        problem: the first reason why the header or an array cannot be decoded. It must be
            copied before it is raised: an exception that was raised keeps the reply's arrays in
            memory.
        own: the user's metric records, by name.
    """

    node: int
    failed: str = ""
    header: Header | None = None
    payload: Payload = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    problem: WireError | None = None
    own: Mapping[str, MetricRecord] = field(default_factory=dict)


def decode(message: Message) -> Decoded:
    """Decode a reply. An error is stored in the result, and never raised."""
    node = message.metadata.src_node_id
    if message.has_error():
        return Decoded(node, failed=f"code {message.error.code}: {reason(message.error.reason)}")
    content = message.content
    metrics, own = our_records(content, MetricRecord).get("metrics"), their_records(content, MetricRecord)
    try:
        header = header_of(content)
    except WireError as error:
        return Decoded(node, metrics=metrics, problem=copy(error), own=own)
    payload: Payload = {}
    problem: WireError | None = None
    for section, arrays in our_records(content, ArrayRecord).items():
        payload[section] = {}
        for name, array in arrays.items():
            try:
                payload[section][name] = decoded(array, section, name)
            except WireError as error:
                problem = problem or copy(error)
    return Decoded(node, "", header, payload, metrics, problem, own)


class Reading:
    """Read a round's replies, one by one.

    A client is refused if its reply is an error, is late, is missing or is invalid, or if it
    has no samples (it took no part).

    Attributes:
        parts: the valid replies, by client index. The caller may take them out.
        own: the users' own metric records, by client index.
        refused: client index -> why the client is refused.
        wrong: the refused clients whose reply breaks the protocol. These clients are faulty or
            Byzantine.

    Args:
        cohort: the clients to which the messages went. Each client's first reply counts.
        header: the header of the instruction, which a reply must repeat.
        expected: the tensors and numbers of a valid reply. None: the replies have only records
            of the user's.
    """

    def __init__(self, cohort: Sequence[Client], header: Header | None = None, expected: Expected | None = None) -> None:
        self._cohort, self._header, self._expected = cohort, header, expected
        self._by_node, self.parts = {client.node: client for client in cohort}, dict[int, Reply]()
        self.own, self.refused, self.wrong = dict[int, Mapping[str, MetricRecord]](), dict[int, str](), set[int]()

    def read(self, reply: Decoded) -> int | None:
        """Check one reply, and return its client's index. None: it comes from no client of the cohort, or is not the client's first."""
        client = self._by_node.get(reply.node)
        if client is None or client.index in self.own:
            return None
        self.own[client.index] = reply.own
        try:
            if reply.failed:
                raise Absent("error", "", reply.failed)
            if self._expected is not None:
                self.parts[client.index] = self._part(reply, client.index, self._expected)
        except WireError as error:
            self.refused[client.index] = str(error)
            self.wrong |= set() if isinstance(error, Absent) else {client.index}
        return client.index

    def _part(self, reply: Decoded, client: int, expected: Expected) -> Reply:
        if reply.problem is not None:
            raise copy(reply.problem)
        assert reply.header is not None
        assert self._header is not None
        self._header.check(reply.header)
        values = expected.numbers(client, reply.metrics)
        return expected.reply(client, values, reply.payload)

    def end(self) -> None:
        """Refuse the clients that have not replied. Call it after the last reply."""
        self.refused |= {c.index: "no reply before the deadline" for c in self._cohort if c.index not in self.own}

    def all(self, replies: Iterable[Decoded]) -> tuple[list[Reply], dict[int, str], set[int]]:
        """Read all replies. Return the valid ones in client order, the reasons of refused clients, and the ``wrong`` ones."""
        for reply in replies:
            self.read(reply)
            del reply
        self.end()
        return [self.parts[client] for client in sorted(self.parts)], self.refused, self.wrong
