"""Messages out, replies in: one loop for every engine, which looks often, asks again where a node came back, and says whom it waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.log import log
from fl_bn.wire import reason

PASSING = {3, 4, 5, 8}  # Flower's error codes for a message, a node or a process of it that is gone: it may come back
EXPIRED, NEAR = 3, 2.0  # the code of a message whose time to live, our deadline, ran out: seconds before the end that count as then
POLL = 0.2  # seconds between looks for replies; Flower's own loop over gRPC takes 3
LOOK = 2.0  # seconds between looks whether a lost node is back
SAY = 60.0  # seconds of silence after which the log says who is waited for


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float, patience: float = 0.0) -> list[Message]:
    """The replies that come within ``timeout`` seconds, in no particular order.

    A node that is gone, or whose process died, has ``patience`` seconds to come back; then it is sent its message again, since what a
    client does depends on the message and on what it kept before that round. Messages sent again are appended to ``messages``, if that is
    a list.
    """
    sent = messages if isinstance(messages, list) else list(messages)
    if not sent:
        return []
    if isinstance(grid, InProcessGrid):  # what is not answered at once will never be
        return list(grid.send_and_receive(sent))
    return _Post(grid, sent, timeout, patience).replies()


def copy_of(message: Message, ttl: float | None = None) -> Message:
    """A message of its own identity with the same records."""
    m = message.metadata
    return Message(RecordDict(dict(message.content.items())), m.dst_node_id, m.message_type, ttl=ttl or m.ttl, group_id=m.group_id)


@dataclass
class _Lost:
    message: Message
    error: Message


class _Post:
    def __init__(self, grid: Grid, sent: list[Message], timeout: float, patience: float) -> None:
        self.grid, self.sent, self.patience = grid, sent, patience
        self.end = time.monotonic() + timeout
        self.waiting: dict[str, Message] = {}
        self.lost: list[_Lost] = []
        self.until: dict[int, float] = {}  # by node
        self.came: list[Message] = []
        self.looked, self.told, self.addressees = 0.0, time.monotonic(), len(sent)

    def replies(self) -> list[Message]:
        self._push(self.sent)
        while (self.waiting or self.lost) and time.monotonic() < self.end:
            if not self._pull():
                time.sleep(POLL)
            if self.lost:
                self._ask_again()
            self._say()
        if self.waiting:
            self._pull()
        return self.came + [lost.error for lost in self.lost]

    def _push(self, messages: list[Message]) -> None:
        self.waiting |= {identity: m for identity, m in zip(self.grid.push_messages(messages), messages, strict=False) if identity}

    def _pull(self) -> bool:
        came = [
            r
            for r in (self.grid.pull_messages(list(self.waiting)) if self.waiting else ())
            if r.metadata.reply_to_message_id in self.waiting
        ]
        now = time.monotonic()
        for reply in came:
            if (message := self.waiting.pop(reply.metadata.reply_to_message_id, None)) is None:
                continue  # answered twice: the first counts
            node = message.metadata.dst_node_id
            if reply.has_error() and reply.error.code == EXPIRED and now > self.end - NEAR:
                continue  # no reply before the deadline
            if reply.has_error() and reply.error.code in PASSING and now < self.until.setdefault(node, now + self.patience):
                self.lost.append(_Lost(message, reply))
                left = self.until[node] - now
                why = f"code {reply.error.code}: {reason(reply.error.reason)}"
                log(logging.WARNING, "%s: node %s is lost (%s); it has %.0f s to come back", message.metadata.message_type, node, why, left)
            else:
                self.came.append(reply)
        return bool(came)

    def _ask_again(self) -> None:
        now = time.monotonic()
        if now - self.looked < LOOK:
            return
        self.looked, online = now, set(self.grid.get_node_ids())
        lost, self.lost = self.lost, []
        for one in lost:
            node = one.message.metadata.dst_node_id
            if node in online:
                again = copy_of(one.message, ttl=max(1.0, self.end - now))
                log(logging.INFO, "%s: node %s is back, and is asked again", again.metadata.message_type, node)
                self.sent.append(again)
                self._push([again])
            elif now < self.until[node]:
                self.lost.append(one)
            else:
                self.came.append(one.error)

    def _say(self) -> None:
        now = time.monotonic()
        if now - self.told >= SAY:
            self.told, kind = now, self.sent[0].metadata.message_type
            log(
                logging.INFO,
                "%s: %d of %d replies are here; the deadline is in %.0f s",
                kind,
                len(self.came),
                self.addressees,
                self.end - now,
            )
