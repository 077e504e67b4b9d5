"""Send messages, receive replies in one loop for every engine, and ask lost nodes again."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fl_bn.federation.replies import Expected
from fl_bn.federation.values import Payload, Reply
from fl_bn.flower.compat import has_ended, log, simulates
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.wire.codec import Header, decoded, header_of, our_records, their_records
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import Absent, WireError, excerpt, reason

if TYPE_CHECKING:
    from fl_bn.flower.population import Client

PASSING = {3, 4, 5, 8}  # Flower's error codes for a lost message, node or process, which may come back
DIED = 8  # the code for a dead process of a node that is still connected; the node is asked once more
UNREADABLE = 0  # Flower's error code for all other errors
EXPIRED = 3  # the code of an error for a message whose time to live is over, which is the time until the deadline
NEAR = 2.0  # seconds before the deadline; a message that expires after that only means that its reply is late
POLL = 0.2  # seconds between two checks for replies; Flower's own loop over gRPC waits 3
LOOK = 2.0  # seconds between two checks for lost nodes, and for a simulation that has ended
FEW = 8  # the most replies to fetch at a time, since each is freed after use
ENDED = "Flower's simulation has ended: its own error is in the log above (more num-cpus or num-gpus than there are? client_app.py?)"
SAY = 60.0  # seconds between two lines of the log that say how many replies have come


class RunFailed(Exception):  # no RuntimeError, which Flower 1.25 would mistake for one of its own, and not end the run
    """Report that the run cannot go on; the message advises what to do."""


def receive(
    grid: Grid, messages: Iterable[Message], timeout: float, patience: float = 0.0, called: ClientNames = UNNAMED
) -> Iterator[Message]:
    """Yield the replies that come within ``timeout`` seconds, in no particular order.

    An ``InProcessGrid`` has no timeout. A lost node that comes back within
    ``patience`` seconds gets its message again, else an error takes the place of
    its reply. The answer is the same: it depends only on the message and on the
    client's earlier state. A node whose process died gets it again at once, but
    only once: a lack of memory, say, would end the next process, too.
    """
    sent = list(messages)
    if not sent:
        return iter(())
    if isinstance(grid, InProcessGrid):  # in one process, a message without an answer by now will never get one
        return grid.send_and_receive(sent)
    return Mailbox(grid, timeout, patience, called).replies(sent)


def pulled(grid: Grid, waiting: Mapping[str, Message]) -> Iterator[Message]:
    """Yield the replies to the ``waiting`` messages (by id) that have come so far.

    Flower decodes a reply from bytes that the client made, and its parsers may
    raise any exception. So each is fetched alone. One that cannot be decoded, or
    that names another node or message, is replaced by an error of the node that got
    the message. ``grpc.RpcError``: the SuperLink cannot be reached.
    """
    if isinstance(grid, InProcessGrid) or simulates(grid):  # no reply comes as bytes from another machine
        for reply in grid.pull_messages(list(waiting)):
            if (sent := waiting.get(reply.metadata.reply_to_message_id)) is not None:
                yield _from_its_node(reply, sent)
        return
    for identity, message in waiting.items():
        for reply in _opened(grid, identity, message):
            reply.metadata.__dict__["_reply_to_message_id"] = identity
            yield reply


def _opened(grid: Grid, identity: str, message: Message) -> list[Message]:
    """Return a list of the reply to ``message``, or an error in its place, if it has come."""
    try:
        return [_checked(reply, identity, message) for reply in list(grid.pull_messages([identity]))[:1]]
    except grpc.RpcError:
        raise
    except Exception as error:  # Flower, protobuf, JSON or NumPy may raise anything for such bytes
        return [_instead(message, f"its reply cannot be opened: {type(error).__name__}: {error}")]


def _checked(reply: Message, identity: str, message: Message) -> Message:
    """Return ``reply`` if it answers ``message`` from the right node, else an error."""
    m = reply.metadata
    if reply.has_error() == reply.has_content():
        return _instead(message, "its reply has neither content nor an error")
    if m.reply_to_message_id != identity:
        return _instead(message, f"its reply says that it answers message {excerpt(m.reply_to_message_id)}, which is another one")
    if reply.has_error():
        return _from_its_node(reply, message)
    if m.src_node_id != message.metadata.dst_node_id:
        return _instead(message, f"its reply names node {excerpt(m.src_node_id)} as its sender")
    return reply


def _from_its_node(reply: Message, message: Message) -> Message:
    """Return ``reply`` with its node, which Flower's own errors do not name."""
    if reply.has_error():
        reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


def _instead(message: Message, why: str) -> Message:
    return Message(Error(UNREADABLE, why), reply_to=message)


def copy_of(message: Message, ttl: float | None = None, kind: str = "") -> Message:
    """Return a message with the same records, but its own id, and perhaps time to live."""
    m = message.metadata
    return Message(RecordDict(dict(message.content.items())), m.dst_node_id, kind or m.message_type, ttl=ttl or m.ttl, group_id=m.group_id)


class Mailbox:
    """Send the messages of one call of ``receive``, and collect the replies."""

    def __init__(self, grid: Grid, timeout: float, patience: float, called: ClientNames) -> None:
        self.grid, self.patience, self.called = grid, patience, called
        self.end = time.monotonic() + timeout
        self.waiting: dict[str, Message] = {}  # message id -> message without a reply
        self.lost: list[tuple[int, Message, Message]] = []  # nodes that may come back: node, its message, the error
        self.until: dict[int, float] = {}  # lost node -> the time until which it may come back
        self.died: set[int] = set()  # nodes whose process died on this message

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send the messages, and yield replies, or errors of lost nodes, until time is over.

        If the simulation with the clients has ended, ``RunFailed`` is raised.
        """
        self._push(messages)
        looked = logged = time.monotonic()
        while (self.waiting or self.lost) and time.monotonic() < self.end:
            before = len(self.waiting)
            yield from self._arrived()
            if len(self.waiting) == before:
                time.sleep(POLL)
            if (now := time.monotonic()) - looked >= LOOK:
                looked = now
                if has_ended(self.grid):
                    raise RunFailed(ENDED)
                yield from self._ask_again()
            if now - logged >= SAY:
                logged, kind, here = now, messages[0].metadata.message_type, len(messages) - len(self.waiting) - len(self.lost)
                line = "%s: %d of %d replies are here; the deadline is in %.0f s"
                log(logging.INFO, line, kind, here, len(messages), self.end - now)
        yield from self._arrived()
        for _, _, error in self.lost:
            yield error

    def _push(self, messages: list[Message]) -> None:
        self.waiting |= {identity: m for identity, m in zip(self.grid.push_messages(messages), messages, strict=False) if identity}

    def _arrived(self) -> Iterator[Message]:
        """Yield the replies that have come, each freed before the next one."""
        waiting = list(self.waiting)
        for i in range(0, len(waiting), FEW):
            replies = deque(pulled(self.grid, {identity: self.waiting[identity] for identity in waiting[i : i + FEW]}))
            while replies:
                reply = replies.popleft()
                sent = self.waiting.pop(reply.metadata.reply_to_message_id, None)  # None: a second answer does not count
                if sent is not None and self._is_final(reply, sent):
                    yield reply
                del reply

    def _is_final(self, reply: Message, sent: Message) -> bool:
        """Return whether ``reply`` counts: in time, and no error of a node that may come back."""
        node = sent.metadata.dst_node_id
        if not reply.has_error() or reply.error.code not in PASSING:
            return True
        code, why, now = reply.error.code, reason(reply.error.reason), time.monotonic()
        if code == EXPIRED and now > self.end - NEAR:
            return False
        if now >= self.until.setdefault(node, now + self.patience):
            return True
        kind, who = sent.metadata.message_type, self.called.node(node)
        if code == DIED and node in self.died:
            log(logging.WARNING, "%s: %s: %s; that is the second time, and the round goes on without this client", kind, who, why)
            return True
        self.lost.append((node, sent, reply))
        if code == DIED:
            self.died.add(node)
            log(logging.WARNING, "%s: %s: %s; it is asked again", kind, who, why)
        else:
            seconds = self.until[node] - now
            log(logging.WARNING, "%s: %s is lost (code %d: %s); it has %.0f s to come back", kind, who, code, why, seconds)
        return False

    def _ask_again(self) -> Iterator[Message]:
        """Ask lost nodes that came back. Yield the errors of those that did not in time."""
        now, lost, self.lost = time.monotonic(), self.lost, []
        online = set(self.grid.get_node_ids()) if lost else set()
        for node, sent, error in lost:
            if node in online:
                if error.error.code != DIED:
                    log(logging.INFO, "%s: %s is back, and is asked again", sent.metadata.message_type, self.called.node(node))
                self._push([copy_of(sent, ttl=max(1.0, self.end - now))])
            elif now < self.until[node]:
                self.lost.append((node, sent, error))
            else:
                yield error


# reading replies


@dataclass(frozen=True)
class Decoded:
    """Hold a reply that is decoded but not yet checked.

    Attributes:
        failed: the error that came instead of content, in words.
        header: None if it cannot be read. Then the arrays are not decoded either.
        payload: the readable arrays by section and name, in the memory of the
            message.
        problem: why the header or an array cannot be decoded. Copy it before
            raising it: an exception that was raised keeps the reply's arrays in
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

    A client is refused if its reply is an error, late, missing or invalid, or has
    no samples (it took no part). Each client's first reply counts.

    Attributes:
        parts: the valid replies, by client index. The caller may take them out.
        own: the users' own metric records, by client index.
        refused: why clients are refused, by index.
        wrong: the refused clients whose reply breaks the protocol.
    """

    def __init__(self, cohort: Sequence[Client], header: Header | None = None, expected: Expected | None = None) -> None:
        self._cohort, self._header, self._expected = cohort, header, expected
        self._by_node, self.parts = {client.node: client for client in cohort}, dict[int, Reply]()
        self.own, self.refused, self.wrong = dict[int, Mapping[str, MetricRecord]](), dict[int, str](), set[int]()

    def read(self, reply: Decoded) -> int | None:
        """Check one reply, and return its client's index. None: not in the cohort, or repeated."""
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
        """Refuse the clients that have not replied, after the last reply."""
        self.refused |= {c.index: "no reply before the deadline" for c in self._cohort if c.index not in self.own}

    def all(self, replies: Iterable[Decoded]) -> tuple[list[Reply], dict[int, str], set[int]]:
        """Return the valid replies in client order, why clients are refused, and the ``wrong``."""
        for reply in replies:
            self.read(reply)
            del reply
        self.end()
        return [self.parts[client] for client in sorted(self.parts)], self.refused, self.wrong
