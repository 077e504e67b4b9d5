"""The strategy frees a reply as it is used: how many are in memory at once, and that a run's bits are those of all at once."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message

from fl_bn.data.batches import distinct, draw_batches
from fl_bn.federation.intake import TOGETHER
from fl_bn.flower import InProcessGrid, grid_transport
from fl_bn.methods import METHODS
from tests.flower.inside import Defence
from tests.hostile.liars import people
from tests.in_process import WatchedGrid, client_app, identical, run

CLIENTS = 12


class Bytes(bytes):
    """Of the first tensor of a reply: counted while they are in memory."""

    alive = 0

    def __init__(self, *args: Any) -> None:
        Bytes.alive += 1

    def __del__(self) -> None:
        Bytes.alive -= 1


class Counting:
    """Passes replies on, one by one, in an order of its own, and counts how many replies' bytes are in memory."""

    def __init__(self, order: Callable[[list[Message]], list[Message]]) -> None:
        self.order, self.most = order, 0

    def __call__(self, grid: Any, messages: Any, *args: Any, **named: Any) -> Iterator[Message]:
        if messages[0].metadata.message_type != "train":
            yield from grid.send_and_receive(messages)
            return
        content = {m.metadata.src_node_id: m for m in grid.send_and_receive(messages)}
        for node in [m.metadata.dst_node_id for m in self.order(list(messages))]:
            reply = content.pop(node)
            for section in {"fl-bn/weights", "fl-bn/gradients"} & set(reply.content):
                arrays: Any = reply.content[section]
                name, first = next(iter(arrays.items()))
                arrays[name] = Array(first.dtype, first.shape, first.stype, Bytes(first.data))
                del arrays, first
            self.most = max(self.most, Bytes.alive)
            yield reply
            del reply


def counted(monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Message]], list[Message]], **options: Any) -> tuple[int, Any]:
    """The most replies in memory at once, while Python looks for no circles, and the run."""
    gc.collect()
    gc.disable()
    counting = Counting(order)
    monkeypatch.setattr(grid_transport, "receive", counting)
    method = METHODS[options.pop("method", "fedavg")]()
    grid = Plain(client_app(method, people(CLIENTS)), CLIENTS)
    try:
        ran = run(method, people(CLIENTS), 2, grid=grid, **options)
    finally:
        gc.enable()
    assert all(len(record.accepted) == CLIENTS for record in ran.records)
    return counting.most, ran


class Plain(WatchedGrid):
    """Keeps no reply."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        self.received.clear()
        return ids


def backwards(messages: list[Message]) -> list[Message]:
    return messages[::-1]


@pytest.mark.parametrize("method", ["fedavg", "hbn", "fbn"])
def test_replies_that_come_in_turn_are_never_many(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Robust rules keep all. The control: the first comes last, and all the others wait."""
    assert counted(monkeypatch, list, method=method)[0] <= TOGETHER + 1
    assert counted(monkeypatch, backwards, method=method)[0] == CLIENTS
    assert counted(monkeypatch, list, method=method, defence=Defence(1, "median", "median"))[0] == CLIENTS


@pytest.mark.parametrize("method", ["fbn", "silobn"])
def test_a_run_has_the_bits_of_one_that_keeps_all_replies(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = random.Random(3)
    ran = counted(monkeypatch, lambda messages: shuffled.sample(messages, len(messages)), method=method)[1]
    monkeypatch.undo()
    monkeypatch.setattr("fl_bn.flower.strategy.streaming", lambda server, samples: None)
    whole = run(METHODS[method](), people(CLIENTS), 2)
    assert all(identical(ran.trajectory[r], whole.trajectory[r]) for r in (1, 2))
    assert [record.disclosures for record in ran.records] == [record.disclosures for record in whole.records]


class Alive(InProcessGrid):
    """Counts how many replies' weights are in memory when a client has computed another."""

    def __init__(self) -> None:
        super().__init__(client_app(METHODS["fbn"](), people(CLIENTS)), CLIENTS, {})
        self.weights, self.most = list[weakref.ref[Any]](), 0

    def _answer(self, message: Message) -> Message:
        answer = super()._answer(message)
        if message.metadata.message_type == "train":
            record: Any = answer.content["fl-bn/weights"]
            self.weights.append(weakref.ref(next(iter(record.values())).array))
            self.most = max(self.most, sum(one() is not None for one in self.weights))
        return answer


class AllAtOnce(Alive):
    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        return iter(self.pull_messages(self.push_messages(messages)))


def test_in_one_process_a_reply_is_gone_before_the_next_but_few_is_computed() -> None:
    ran = {}
    for kind in (Alive, AllAtOnce):
        gc.collect()
        gc.disable()
        try:
            grid = kind()
            trajectory = run(METHODS["fbn"](), people(CLIENTS), 2, grid=grid).trajectory  # type: ignore[arg-type]
        finally:
            gc.enable()
        assert len(grid.weights) == 2 * CLIENTS
        ran[kind] = grid.most, trajectory
    assert ran[Alive][0] <= TOGETHER + 1
    assert ran[AllAtOnce][0] == CLIENTS  # control
    assert all(identical(ran[Alive][1][round], ran[AllAtOnce][1][round]) for round in (1, 2))


@pytest.mark.parametrize(("epochs", "steps"), [(1, 0), (3, 0), (0, 1), (0, 2), (0, 5), (0, 40)])
def test_the_planned_weight_is_the_number_of_samples_drawn(epochs: int, steps: int) -> None:
    for n in range(2, 40):
        for batch in (2, 3, 16, 64):
            drawn = draw_batches(n, batch, np.random.default_rng(0), epochs=epochs, steps=steps)
            assert distinct(n, batch, epochs=epochs, steps=steps) == len(np.unique(np.concatenate(list(drawn)))), (n, batch)
    assert distinct(1, 4, epochs=epochs, steps=steps) == 0
