"""The session, whatever comes, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_bn.exchange import session as session_module
from fl_bn.exchange.call import Answer, Join, Local, Request
from fl_bn.exchange.session import POLICIES
from tests.exchange.cohorts import (
    GRADIENTS,
    NAN,
    VARIANCE,
    WIDE,
    Clock,
    Cohort,
    Outcome,
    bits,
    local,
)

# whatever comes, in whatever order


class Random:
    """A cohort at the mercy of a list of actions, with what must hold after each."""

    def __init__(self, clients: int, policy: str, clock: Clock) -> None:
        self.cohort, self.clock = Cohort(clients, policy), clock
        self.session = self.cohort.session
        self.pending: dict[int, list[tuple[Request, Outcome]]] = {client: [] for client in range(clients)}
        self.answers = dict.fromkeys(range(clients), 0)
        self.left: set[int] = set()

    def act(self, client: int, action: str) -> None:
        kind = action.partition(" ")[0]
        if action == "all send":
            for other in range(len(self.pending)):
                self.act((client + other) % len(self.pending), "sends")
        elif action == "time passes":
            self.clock.now += 100
            self.session.expire()
        elif kind == "leaves":
            self.left.add(client)
            self.session.leave(client, "it died" if action == "leaves dying" else "")
        elif action == "sends again" or not self.pending[client]:
            request = self.request(client, action)
            self.pending[client].append((request, self.cohort.submit(client, request)))
        self.check()

    def request(self, client: int, action: str) -> Request:
        steps = self.answers[client]
        if action == "sends nothing":
            return Join(0)
        if steps == 0 and action != "sends garbage":
            return Join(client + 1)
        value = NAN if action == "sends garbage" else float(10 * client + steps)
        return local(value, value * value, layer=WIDE, count=client + 2, quantity=GRADIENTS if action == "sends odd" else VARIANCE)

    def check(self) -> None:
        """No second answer, one answer for all, and nobody left hanging."""
        answered: list[tuple[int, Request, Answer]] = []
        for client, pending in self.pending.items():
            for request, outcome in pending:
                assert len(outcome) <= 1
                if outcome and isinstance(outcome[0], Answer) and request != Join(0):
                    answered.append((client, request, outcome[0]))
                    self.answers[client] += 1
            pending[:] = [(request, outcome) for request, outcome in pending if not outcome]
        exchanged = [(client, request, got) for client, request, got in answered if isinstance(request, Local)]
        assert exchanged in ([], answered)
        if answered:
            first = answered[0][2]
            assert all(
                bits(got.values) == bits(first.values) and (got.count, got.batch) == (first.count, first.batch) for *_, got in answered
            )
            assert first.batch == sum(client + 1 for client, *_ in answered)
        if exchanged:
            assert len({request.key for _, request, _ in exchanged}) == 1
            assert first.count == sum(request.count for _, request, _ in exchanged)
            mean = sum(request.count * request.values for _, request, _ in exchanged) / first.count
            assert torch.allclose(first.values, mean)
        hanging = {client for client, pending in self.pending.items() if pending}
        if not self.session.active - hanging - self.left:
            assert not hanging

    def end(self) -> None:
        """Whoever is awaited leaves; then nobody may wait any more."""
        for client in sorted(self.session.active):
            if not self.pending[client]:
                self.act(client, "leaves")
        for outcome in self.cohort.outcomes:
            assert len(outcome) == 1


WHATEVER = (
    ["sends"] * 6
    + ["all send"] * 6
    + ["sends odd", "sends garbage", "sends again", "sends nothing", "leaves", "leaves dying", "time passes"]
)


@contextmanager
def silent_at(clock: Clock) -> Iterator[None]:
    """Fixtures live as long as all of hypothesis' examples; this lasts for one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=clock.monotonic))
        monkeypatch.setattr(session_module.LOGGER, "disabled", True)
        yield


@settings(max_examples=300)
@given(st.integers(1, 4), st.sampled_from(POLICIES), st.lists(st.tuples(st.integers(0, 3), st.sampled_from(WHATEVER)), max_size=40))
def test_whatever_comes_nobody_hangs_nobody_is_answered_twice_and_all_get_the_same(
    clients: int, policy: str, actions: list[tuple[int, str]]
) -> None:
    clock = Clock()
    with silent_at(clock):
        random = Random(clients, policy, clock)
        for client, action in actions:
            random.act(client % clients, action)
        random.end()
