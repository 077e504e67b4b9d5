"""Deliver replies as Flower's transport does: they are decoded when the server pulls them, and errors of decoding are raised then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.flower.in_process import InProcessGrid
from tests.hostile.recorded import Liar


class ByteGrid(Grid):
    """Pass replies of clients in this process through Flower's transport; ``liar`` may change the bytes of a reply.

    As in Flower's own grid, all replies of a pull are lost if one of them raises an error.
    """

    def __init__(self, inner: InProcessGrid, liar: Liar) -> None:
        self.inner, self.liar = inner, liar

    def set_run(self, run_id: Any) -> None:
        self.inner.set_run(run_id)

    @property
    def run(self) -> Any:
        return self.inner.run

    def create_message(self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None) -> Message:
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.liar.delivered(reply) for reply in self.inner.pull_messages(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
