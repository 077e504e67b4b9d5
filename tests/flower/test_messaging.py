"""Messages out, replies in, over a grid that takes its time and loses some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.flower import BatchNormStrategy, InProcessGrid, Rounds
from fl_bn.flower.wire import messaging as module
from fl_bn.flower.wire.messaging import DIED, LOOK, PASSING, POLL, SAY, receive
from fl_bn.methods import METHODS, Method
from tests.flower.inside import RoundRecord, Samples
from tests.flower.test_recovery import with_files
from tests.in_process import WatchedGrid, a_tenth, client_app, identical, run
from tests.kept import Kept
from tests.listed import listed
from tests.networks import seeded_network

FBN = METHODS["fbn"]()
NEVER = 10**6


class Clock:
    """Time that passes when somebody sleeps, and never else."""

    def __init__(self) -> None:
        self.now, self.sleeps = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class SlowGrid(Grid):
    """As a SuperLink: replies can be had some seconds after the message, or never. ``late(message)``: when, None for never."""

    def __init__(self, inner: InProcessGrid, clock: Clock, late: Callable[[Message], float | None] = lambda message: 0.0) -> None:
        self.inner, self.clock, self.late = inner, clock, late
        self.due: dict[str, tuple[float, Message]] = {}
        self.pulls: list[set[str]] = []

    def set_run(self, run_id: int) -> None:
        self.inner.set_run(run_id)

    @property
    def run(self) -> Any:
        return self.inner.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self.inner.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(self.inner.push_messages(messages))
        for identity, message, reply in zip(ids, messages, self.inner.pull_messages(ids), strict=True):
            if (late := self.late(message)) is not None:
                self.due[identity] = (self.clock.now + late, reply)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        self.pulls.append(wanted)
        ready = [identity for identity in wanted if identity in self.due and self.due[identity][0] <= self.clock.now]
        return [self.due.pop(identity)[1] for identity in ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("Flower's own loop, which looks every 3 seconds, must not be used")


def inner(clients: list[Samples]) -> WatchedGrid:
    return WatchedGrid(client_app(FBN, clients), len(clients))


def hellos(grid: SlowGrid) -> list[Message]:
    return [Message(RecordDict(), node, "query.hello", ttl=60.0, group_id="0") for node in grid.get_node_ids()]


def sources(replies: Iterable[Message]) -> list[int]:
    return sorted(reply.metadata.src_node_id for reply in replies)


def test_replies_are_taken_as_they_come_and_not_asked_for_again(clock: Clock, clients: list[Samples]) -> None:
    grid = SlowGrid(inner(clients), clock, lambda message: 1.0 * message.metadata.dst_node_id)
    replies = list(receive(grid, iter(hellos(grid)), 60.0))
    assert sources(replies) == [1, 2, 3]
    assert clock.now == pytest.approx(1003, abs=2 * POLL)  # and no longer than the last takes
    assert {len(wanted) for wanted in grid.pulls} == {1}  # each is pulled alone, so that one that cannot be opened costs no other
    looks = sorted(Counter(identity for wanted in grid.pulls for identity in wanted).values())
    assert looks == pytest.approx([1 / POLL, 2 / POLL, 3 / POLL], abs=4)
    assert set(clock.sleeps) == {POLL}


@listed("timeout", [0.05, 1.0, 10.0, 3.5 * SAY])
def test_what_is_late_or_lost_is_not_waited_for_beyond_the_deadline(
    timeout: float, clock: Clock, clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    """From time to time the log says who is waited for. A reply that comes with the deadline counts."""
    begin = clock.now
    grid = SlowGrid(inner(clients), clock, lambda message: {1: 0.0, 2: None, 3: 1000.0}[message.metadata.dst_node_id])
    assert sources(receive(grid, hellos(grid), timeout)) == [1]
    assert timeout <= clock.now - begin <= timeout + POLL
    assert log.text.count("1 of 3 replies are here") == timeout // SAY
    grid = SlowGrid(inner(clients), clock, lambda message: timeout)
    assert sources(receive(grid, hellos(grid), timeout)) == [1, 2, 3]


# Asked again


class Lossy(SlowGrid):
    """Nodes that die: ``dies[node]``: how many of its messages end in Flower's error ``code``; ``offline(node, now)``: who is away."""

    def __init__(self, inner: InProcessGrid, clock: Clock, dies: dict[int, int], code: int = 4) -> None:
        super().__init__(inner, clock)
        self.dies, self.code, self.kinds = dies, code, list[tuple[str, int]]()
        self.offline: Callable[[int, float], bool] = lambda node, now: False

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if not self.offline(node, self.clock.now)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for identity, message in zip(ids, messages, strict=True):
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            self.kinds.append((kind, node))
            if kind != "query.hello" and self.dies.get(node, 0) > 0:
                self.dies[node] -= 1
                error = Message(Error(self.code, "it died"), reply_to=message)
                error.metadata.__dict__["_src_node_id"] = 99  # Flower itself answers, and not in the node's name
                self.due[identity] = (self.clock.now + 1.0, error)
        return ids


def trains(grid: SlowGrid) -> list[Message]:
    content = RecordDict({"fl-bn/config": ConfigRecord({})})
    return [Message(content, node, "query.rendezvous", ttl=500.0, group_id="7") for node in grid.inner.get_node_ids()]


def outcome(replies: Iterable[Message]) -> dict[str, int]:
    found = Counter("error" if reply.has_error() else "reply" for reply in replies)
    return dict(found)


@pytest.fixture
def answering(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> WatchedGrid:
    """Clients that answer at once, without doing anything."""
    monkeypatch.setattr("fl_bn.flower.handlers.connect", lambda *_: SimpleNamespace(close=lambda: None))
    return inner(clients)


@listed("code", sorted(PASSING))
def test_a_node_that_died_is_asked_again_once_it_is_back(code: int, clock: Clock, answering: WatchedGrid) -> None:
    grid, begin = Lossy(answering, clock, {2: 1}, code), clock.now
    grid.offline = lambda node, now: node == 2 and now < begin + 20
    sent = trains(grid)
    replies = list(receive(grid, sent, 60.0, patience=30.0))
    assert outcome(replies) == {"reply": 3}
    assert 20 <= clock.now - begin <= 20 + LOOK + 2 * POLL
    assert sorted(reply.metadata.src_node_id for reply in replies) == [1, 2, 3]
    again = answering.sent[-1]
    assert (again.metadata.dst_node_id, again.metadata.message_type, again.metadata.group_id) == (2, "query.rendezvous", "7")
    assert again.metadata.ttl <= 60 - 20


@listed(
    ("times", "code", "timeout", "patience", "back", "until", "asked"),
    [
        pytest.param(1, 4, 600.0, 30.0, NEVER, (31, 31 + LOOK), 1, id="it does not come back"),
        pytest.param(NEVER, 4, 600.0, 30.0, 0, (30, 32 + LOOK), None, id="it dies of every message: the patience is for all its deaths"),
        pytest.param(NEVER, DIED, 600.0, 300.0, 0, (1, 2 + LOOK), 2, id="its process dies twice, for want of memory, say"),
        pytest.param(NEVER, 4, 10.0, 300.0, 5, (0, 10), None, id="the deadline is before any patience"),
        pytest.param(1, 2, 60.0, 30.0, 0, (1, 1), 1, id="an error of its own"),
        pytest.param(1, 4, 60.0, 0.0, 0, (1, 1), 1, id="without patience"),
    ],
)
def test_a_node_is_given_up(
    times: int,
    code: int,
    timeout: float,
    patience: float,
    back: int,
    until: tuple[float, float],
    asked: int | None,
    clock: Clock,
    answering: WatchedGrid,
) -> None:
    grid, begin = Lossy(answering, clock, {2: times}, code), clock.now
    grid.offline = lambda node, now: node == 2 and now < begin + back
    assert outcome(receive(grid, trains(grid), timeout, patience))["reply"] == 2
    assert until[0] <= clock.now - begin <= until[1] + 4 * POLL
    assert asked is None or [node for _, node in grid.kinds].count(2) == asked
    assert code != DIED or outcome(receive(Lossy(answering, clock, {2: 2}), trains(grid), timeout, patience)) == {"reply": 3}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "files"), [("fbn", False), ("hbn", False), ("fedbn", True), ("hbn", True)])
def test_a_run_whose_nodes_die_and_come_back_is_the_same_to_the_bit(
    name: str, files: bool, clock: Clock, clients: list[Samples], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Each client has even trained when it is lost: what it kept of that round must not be what it starts from again."""
    method = METHODS[name]()
    grid = Lossy(with_files(method, clients, tmp_path) if files else WatchedGrid(client_app(method, clients), 3), clock, {2: 2, 3: 1})
    *records, result = played(grid, method, retry=30.0)
    plain = run(method, clients, 3)
    assert identical({k: a.numpy() for k, a in result.arrays.items()}, plain.trajectory[3])  # type: ignore[attr-defined]
    assert [record.loss for record in records] == [record.loss for record in plain.records]
    assert [grid.dies[node] for node in (2, 3)] == [0, 0]
    assert "but started from" not in log.text


# Whole runs


def played(grid: Grid, method: Method = FBN, **policy: Any) -> list[RoundRecord]:
    records: list[RoundRecord] = []
    plain = {"clients": 3, "wait": 30.0, "timeout": 60.0, "calibrate": 0, "unit_scale": False}  # as ``run`` has it
    rounds = Rounds(**{**plain, "rate": a_tenth, **policy})
    strategy = BatchNormStrategy(seeded_network("cnn"), method, rounds, callbacks=[Kept(records)])
    result = strategy.start(grid, num_rounds=3)
    records.append(result)  # type: ignore[arg-type]
    return records


def test_a_new_node_that_says_nothing_does_not_hold_up_every_round(clock: Clock, clients: list[Samples]) -> None:
    """It is online, but hangs: one wait for it is fair, one in every round is not."""
    grid = SlowGrid(inner(clients), clock)
    ids, silent = grid.inner.get_node_ids, 4
    grid.inner._contexts[silent] = grid.inner._contexts[3]
    grid.inner.get_node_ids = lambda: [node for node in ids() if node != silent or grid.pulls]  # type: ignore[method-assign]
    grid.late = lambda message: None if message.metadata.dst_node_id == silent else 0.0
    *records, _ = played(grid)
    assert [len(record.accepted) for record in records] == [3, 3, 3]
    assert sum(clock.sleeps) <= 30 + 2 * POLL
