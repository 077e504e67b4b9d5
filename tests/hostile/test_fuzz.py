"""Mutated messages and sequences of calls: the server lives, the round goes on, the liar alone pays, memory and time stay bounded."""

from __future__ import annotations

import numpy as np
import pytest

from fl_bn.federation import schema
from fl_bn.flower import RunFailed
from tests.hostile.liars import LIAR, lied, sets
from tests.hostile.recorded import CLIENTS, SCENARIOS
from tools.hostile.fuzz import fuzz, sequences, table
from tools.hostile.lies import lie_to_server
from tools.hostile.outcomes import BROKEN, REFUSED, SAME, Outcome, honest, judged

MEMORY = 300.0  # MB: the largest mutated payload has some 4, and the liar is in this process, too


def check(mutations: int, number: int, seed: int) -> None:
    tally = fuzz(mutations, seed)
    assert tally.broken == []
    assert tally.peak < MEMORY
    assert sum(tally.counts.values()) == mutations
    for target in ("server", "client"):
        assert tally.counts[target, REFUSED] > 0, table(tally)
    assert sequences(number, seed) == (number, [])


@pytest.mark.slow
@pytest.mark.pinned
def test_mutated_messages_and_sequences_of_calls() -> None:
    """A few here, and some thousand in the nightly test below."""
    check(15, 15, seed=16)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.pinned
@pytest.mark.timeout(600)
def test_some_thousand() -> None:
    """The command makes 100,000 and 10,000: ``python -m tools.hostile.fuzz``."""
    check(1500, 2000, seed=17)


def test_a_client_that_calls_itself_another_is_refused_and_the_other_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    """It took the other's place, whose replies were then measured against what the liar had said."""
    lie = sets("query.hello", "hello", client=3)
    ran = lied(lie, "ln", policy={"nodes": tuple(range(1, CLIENTS + 1))})
    others = [client for client in range(CLIENTS) if client != LIAR]
    assert [[c.client for c in record.accepted] for record in ran.records] == [others] * 2
    assert any("node 2 " in line and "client 3" in line for line in caplog.messages)
    with pytest.raises(RunFailed, match="nodes 2 and 4"):  # control: here a number decides on the data, so neither is preferred
        lied(lie, "ln")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCENARIOS)
def test_control_where_nobody_lies_everyone_counts(name: str) -> None:
    ran = honest(name)
    assert ran.record.aggregated
    assert [c.refused for c in ran.record.clients] == [""] * CLIENTS
    assert judged(name, ran, []) == Outcome(SAME, "")
    assert judged(name, ran, ["a line\nof two"]).kind == BROKEN  # control


def test_control_a_broken_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arrays are believed unchecked, the same mutations break it."""
    assert lie_to_server("fedavg", np.random.default_rng([1, 0]))[1].kind != BROKEN  # this also records what honest clients send
    monkeypatch.setattr(schema.Schema, "check", lambda self, payload: None)
    outcomes = (lie_to_server("fedavg", np.random.default_rng([1, i]))[1] for i in range(150))
    assert any(outcome.kind == BROKEN for outcome in outcomes)
