"""How many clients an app of one's own has: what nodes say is compared while they come, and none of them decides alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.conversion import convert
from fl_bn.federation.payload import signature
from fl_bn.flower import RunFailed
from fl_bn.flower.wire import introductions
from fl_bn.flower.wire.introductions import introduced
from fl_bn.methods import METHODS
from tests.hostile.liars import sets
from tests.hostile.own_app import CLIENTS, LyingGrid, Spoil, net, own_app

METHOD = METHODS["fbn"]()
RIGHT = signature(convert(net(), METHOD), METHOD)


def nothing(message: Message, asked: str, content: RecordDict) -> None:
    """Nobody lies."""


class Elsewhere(Grid):
    """Nodes on other machines: node ``n`` comes after ``after[n]`` seconds, else at once; ``silent`` ones never answer."""

    def __init__(
        self, after: dict[int, float] | None = None, silent: Iterable[int] = (), liars: Iterable[int] = (), spoil: Spoil = nothing
    ) -> None:
        self._inner, self._begin = LyingGrid(own_app("fbn"), set(liars), spoil), time.monotonic()
        self.after, self.silent = after or {}, set(silent)

    def set_run(self, run_id: Any) -> None:
        self._inner.set_run(run_id)

    @property
    def run(self) -> Any:
        return self._inner.run

    def create_message(self, *args: Any, **named: Any) -> Message:
        return self._inner.create_message(*args, **named)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self._inner.get_node_ids() if time.monotonic() - self._begin >= self.after.get(node, 0.0)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._sent(message) for message in messages]

    def _sent(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        return f"to {node}" if node in self.silent else next(iter(self._inner.push_messages([message])))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "PATIENCE", 1.0)
    monkeypatch.setattr(introductions, "POLL", 0.02)


def nodes(grid: Grid, least: int = 2, clients: int = 0) -> tuple[int, list[int]]:
    number, found = introduced(grid, least, 5.0, RIGHT, clients)
    return number, sorted(reply.metadata.src_node_id for reply in found.replies)


def test_all_clients_are_waited_for() -> None:
    assert nodes(Elsewhere({4: 0.3, 5: 0.6})) == (CLIENTS, [1, 2, 3, 4, 5])


def test_but_not_for_ever_where_enough_are_there() -> None:
    begin = time.monotonic()
    assert nodes(Elsewhere({5: 60.0})) == (CLIENTS, [1, 2, 3, 4])
    assert 1.0 <= time.monotonic() - begin < 4.0


def test_nor_for_one_that_never_answers() -> None:
    assert nodes(Elsewhere(silent=[1])) == (CLIENTS, [2, 3, 4, 5])


@pytest.mark.parametrize("fields", [{"signature": "0" * 16}, {"clients": 2}, {"clients": 3}, {"samples": -1}], ids=str)
def test_those_who_come_first_decide_nothing(fields: dict[str, Any]) -> None:
    """Two liars are there before anybody else: with what they say the run would fail, or begin without the others."""
    grid = Elsewhere({3: 0.3, 4: 0.3, 5: 0.3}, liars=[1, 2], spoil=sets("query.hello", "hello", **fields))
    assert nodes(grid, 3) == (CLIENTS, [1, 2, 3, 4, 5])


def test_where_too_few_come_the_run_fails_in_time() -> None:
    with pytest.raises(RunFailed, match="only 1 of 2 nodes came within 1 s. Start the others"):
        introduced(Elsewhere(dict.fromkeys((2, 3, 4, 5), 60.0)), 2, 1.0, RIGHT)
    with pytest.raises(RunFailed, match="only 1 of 2 nodes may take part: 4 nodes did not say within 1 s who they are"):
        introduced(Elsewhere(silent=[1, 2, 3, 4]), 2, 5.0, RIGHT)
    wrong = Elsewhere(liars=range(1, 6), spoil=sets("query.hello", "hello", signature="0" * 16))
    with pytest.raises(RunFailed, match="client 0 has another model, method or version of fl-bn"):
        introduced(wrong, 2, 5.0, RIGHT)
