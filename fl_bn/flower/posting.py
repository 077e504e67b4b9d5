"""Messages out, replies in: one loop for every engine, which looks often and says what it is waiting for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fl_bn.flower.in_process import InProcessGrid

POLL = 0.2  # seconds between looks for replies; Flower's own loop over gRPC takes 3
SAY = 60.0  # seconds of silence after which the log says who is waited for


def send_and_receive(grid: Grid, messages: Iterable[Message], timeout: float) -> list[Message]:
    """The replies that come within ``timeout`` seconds, in no particular order."""
    messages = list(messages)
    if not messages:
        return []
    if isinstance(grid, InProcessGrid):  # what is not answered at once will never be
        return list(grid.send_and_receive(messages))
    pushed = {identity for identity in grid.push_messages(messages) if identity}
    kind, replies, begin = messages[0].metadata.message_type, list[Message](), time.monotonic()
    told = begin
    while pushed:
        came = list(grid.pull_messages(pushed))
        replies += came
        pushed -= {reply.metadata.reply_to_message_id for reply in came}
        now = time.monotonic()
        if not pushed or now - begin >= timeout:
            break
        if now - told >= SAY:
            told = now
            left = begin + timeout - now
            log(logging.INFO, "%s: %d of %d replies are here; the deadline is in %.0f s", kind, len(replies), len(messages), left)
        if not came:
            time.sleep(POLL)
    return replies
