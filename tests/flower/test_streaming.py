"""The strategy frees a reply as it is used: how many are in memory at once, and that a run's bits are those of all at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Message

from fl_bn.federation.server import Server
from fl_bn.flower import InProcessGrid
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.hostile.liars import people
from tests.in_process import WatchedGrid, client_app, identical, run

CLIENTS = 12


@pytest.mark.sample("[fbn]")
@every_method
def test_a_run_has_the_bits_of_one_that_keeps_all_replies(method_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, clients = METHODS[method_name](), people(CLIENTS)
    ran = run(method, clients, 2, grid=WatchedGrid(client_app(method, clients), CLIENTS, shuffle=3))
    monkeypatch.setattr(Server, "intake", lambda self, cohort: None)
    whole = run(method, clients, 2)
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
    assert ran[Alive][0] <= 2
    assert ran[AllAtOnce][0] == CLIENTS  # control
    assert all(identical(ran[Alive][1][round], ran[AllAtOnce][1][round]) for round in (1, 2))
