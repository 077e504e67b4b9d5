"""Messages out, replies in, over a grid that takes its time and loses some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

from fl_bn.flower import BatchNormStrategy, InProcessGrid, Rounds
from fl_bn.flower.wire import messaging as module
from fl_bn.flower.wire.messaging import DIED, LOOK, POLL, receive
from fl_bn.methods import METHODS, Method
from tests.exchange.cohorts import Clock
from tests.flower.inside import RoundRecord, Samples
from tests.hostile.recorded import Liar
from tests.in_process import WatchedGrid, a_tenth, client_app, identical, run
from tests.kept import Kept
from tests.listed import listed
from tests.networks import seeded_network
from tools.hostile.transport import ByteGrid

FBN = METHODS["fbn"]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class SlowGrid(ByteGrid):
    """As a SuperLink: replies can be had some seconds after the message, or never; nodes die, and are away.

    Attributes:
        late: Returns how many seconds after a message its reply can be had; None: never.
        dies: How many of a node's messages end in Flower's error ``code``.
        away: Returns whether a node is offline at this time.
    """

    def __init__(self, inner: InProcessGrid, clock: Clock, late: Callable[[Message], float | None] = lambda message: 0.0) -> None:
        super().__init__(inner, Liar())
        self.clock, self.late, self.dies, self.code = clock, late, dict[int, int](), 4
        self.away: Callable[[int], bool] = lambda node: False
        self.due: dict[str, tuple[float, Message]] = {}
        self.pulls: list[set[str]] = []

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if not self.away(node)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for identity, message, reply in zip(ids, messages, super().pull_messages(ids), strict=True):
            node, late = message.metadata.dst_node_id, self.late(message)
            if message.metadata.message_type != "query.hello" and self.dies.get(node, 0) > 0:
                self.dies[node] -= 1
                reply, late = Message(Error(self.code, "it died"), reply_to=message), 1.0
                reply.metadata.__dict__["_src_node_id"] = 99  # Flower itself answers, and not in the node's name
            if late is not None:
                self.due[identity] = (self.clock.now + late, reply)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        self.pulls.append(wanted)
        ready = [identity for identity in wanted if identity in self.due and self.due[identity][0] <= self.clock.now]
        return [self.due.pop(identity)[1] for identity in ready]


def grid_of(clients: list[Samples]) -> WatchedGrid:
    return WatchedGrid(client_app(FBN, clients), len(clients))


def sources(grid: SlowGrid, timeout: float) -> list[int]:
    """Ask every node to introduce itself; return those that did in time."""
    sent = [Message(RecordDict(), node, "query.hello", ttl=60.0, group_id="0") for node in grid.get_node_ids()]
    return sorted(reply.metadata.src_node_id for reply in receive(grid, iter(sent), timeout))


def test_replies_are_taken_as_they_come_and_not_asked_for_again(clock: Clock, clients: list[Samples]) -> None:
    grid = SlowGrid(grid_of(clients), clock, lambda message: 1.0 * message.metadata.dst_node_id)
    assert sources(grid, 60.0) == [1, 2, 3]
    assert clock.now == pytest.approx(1003, abs=2 * POLL)  # and no longer than the last takes
    assert {len(wanted) for wanted in grid.pulls} == {1}  # each is pulled alone, so that one that cannot be opened costs no other
    looks = sorted(Counter(identity for wanted in grid.pulls for identity in wanted).values())
    assert looks == pytest.approx([1 / POLL, 2 / POLL, 3 / POLL], abs=4)


@listed("timeout", [0.05, 10.0])
def test_what_is_late_or_lost_is_not_waited_for_beyond_the_deadline(timeout: float, clock: Clock, clients: list[Samples]) -> None:
    """A reply that comes with the deadline counts."""
    begin = clock.now
    grid = SlowGrid(grid_of(clients), clock, lambda message: {1: 0.0, 2: None, 3: timeout + 1}[message.metadata.dst_node_id])
    assert sources(grid, timeout) == [1]
    assert timeout <= clock.now - begin <= timeout + POLL
    grid.late = lambda message: timeout
    assert sources(grid, timeout) == [1, 2, 3]


@listed(
    ("code", "dies", "back", "least", "most"),
    [
        pytest.param(4, 1, False, 31, 31 + LOOK, id="it does not come back"),
        pytest.param(4, 99, True, 30, 32 + LOOK, id="it dies of every message: the patience is for all its deaths"),
        pytest.param(DIED, 99, True, 1, 2 + LOOK, id="its process dies twice, for want of memory, say"),
        pytest.param(2, 1, True, 1, 1, id="an error of its own"),
    ],
)
def test_a_node_is_given_up(code: int, dies: int, back: bool, least: float, most: float, clock: Clock, clients: list[Samples]) -> None:
    grid, begin = SlowGrid(grid_of(clients), clock), clock.now
    grid.code, grid.dies, grid.away = code, {2: dies}, lambda node: node == 2 and not back
    sent = [Message(RecordDict(), node, "train", ttl=500.0, group_id="7") for node in (1, 2, 3)]
    (died,) = [reply for reply in receive(grid, sent, 600.0, 30.0) if reply.error.reason == "it died"]
    assert died.metadata.src_node_id == 2
    assert least <= clock.now - begin <= most + 4 * POLL


def played(grid: SlowGrid, method: Method = FBN, **policy: Any) -> tuple[list[RoundRecord], dict[str, Any]]:
    """Run three rounds; return their records and the arrays."""
    records: list[RoundRecord] = []
    plain = {"clients": 3, "wait": 30.0, "timeout": 60.0, "calibrate": 0, "unit_scale": False}  # as ``run`` has it
    rounds = Rounds(**{**plain, "rate": a_tenth, **policy})
    strategy = BatchNormStrategy(seeded_network("cnn"), method, rounds, callbacks=[Kept(records)])
    result = strategy.start(grid, num_rounds=3)
    return records, {k: a.numpy() for k, a in result.arrays.items()}


@pytest.mark.sample("[hbn-True")
@pytest.mark.parametrize(("name", "files"), [("fbn", False), ("hbn", False), ("fedbn", True), ("hbn", True)])
def test_a_run_whose_nodes_die_and_come_back_is_the_same_to_the_bit(
    name: str, files: bool, clock: Clock, clients: list[Samples], tmp_path: Path
) -> None:
    """Each client has even trained when it is lost: what it kept of that round must not be what it starts from again."""
    method, begin = METHODS[name](), clock.now
    grid = SlowGrid(WatchedGrid(client_app(method, clients, state=tmp_path if files else None), 3), clock)
    grid.dies, grid.away = {2: 2, 3: 1}, lambda node: node == 3 and begin < clock.now < begin + 20
    records, arrays = played(grid, method, retry=30.0)
    plain = run(method, clients, 3)
    assert identical(arrays, plain.trajectory[3])
    assert [record.loss for record in records] == [record.loss for record in plain.records]
    assert [grid.dies[node] for node in (2, 3)] == [0, 0]
    assert 20 <= clock.now - begin <= 30 + 3 * LOOK


def test_a_new_node_that_says_nothing_does_not_hold_up_every_round(clock: Clock, clients: list[Samples]) -> None:
    """It is online, but hangs: one wait for it is fair, one in every round is not."""
    inner, begin = WatchedGrid(client_app(FBN, clients), 4), clock.now
    grid = SlowGrid(inner, clock, lambda message: None if message.metadata.dst_node_id == 4 else 0.0)
    grid.away = lambda node: node == 4 and not grid.pulls
    records, _ = played(grid)
    assert [len(record.accepted) for record in records] == [3, 3, 3]
    assert clock.now - begin <= 30 + 2 * POLL
