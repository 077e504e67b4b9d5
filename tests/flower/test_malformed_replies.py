"""Replies of strangers, second and malformed ones: none is averaged, nothing is unpickled, and none stays in memory."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fl_bn.flower import InProcessGrid
from fl_bn.methods import METHODS
from tests.flower.byzantine import OneRound
from tests.hostile.liars import alters, people, sets
from tests.in_process import client_app, identical, run


def test_strangers_second_replies_and_another_header_are_ignored() -> None:
    one = OneRound("fbn", people())
    expected = one.served().tensors
    other = alters("weights", lambda name, array: array + 1)
    second, stranger = (one.spoilt(0, other) for _ in range(2))
    stranger.metadata.__dict__["_src_node_id"] = 999
    with_second = one.combined([stranger, *one.replies, second])
    assert identical(with_second.tensors, expected)
    assert not identical(one.combined([second, *one.replies[1:]]).tensors, expected)  # control: the first one counts
    late = one.combined([one.replies[0], one.spoilt(1, sets("train", "header", round=9)), *one.replies[2:]])
    assert late.refused[1].startswith("header/round")


def test_nothing_a_reply_brings_is_unpickled() -> None:
    """An object array would run code when unpickled: here it would end the test."""
    one = OneRound("fedbn", people())
    target = io.BytesIO()
    np.save(target, np.array([Bomb()], dtype=object), allow_pickle=True)
    bomb = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=target.getvalue())

    def spoil(message: Message, asked: str, content: RecordDict) -> None:
        content["fl-bn/weights"] = ArrayRecord({**content.array_records["fl-bn/weights"], "9.bias": bomb})

    assert "weights/9.bias" in one.combined([one.spoilt(0, spoil), *one.replies[1:]]).refused[0]
    with pytest.raises(AssertionError):
        np.load(io.BytesIO(target.getvalue()), allow_pickle=True)  # control: it is a bomb


def explode() -> None:
    raise AssertionError("unpickled")


class Bomb:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


# How many replies are in memory at once

MANY = 12


class Alive(InProcessGrid):
    """Counts how many replies' weights are in memory when a client has computed another."""

    def __init__(self) -> None:
        super().__init__(client_app(METHODS["fbn"](), people(MANY)), MANY, {})
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
            trajectory = run(METHODS["fbn"](), people(MANY), 2, grid=grid).trajectory  # type: ignore[arg-type]
        finally:
            gc.enable()
        assert len(grid.weights) == 2 * MANY
        ran[kind] = grid.most, trajectory
    assert ran[Alive][0] <= 2
    assert ran[AllAtOnce][0] == MANY  # control
    assert all(identical(ran[Alive][1][round], ran[AllAtOnce][1][round]) for round in (1, 2))
