"""Mutated messages: the server lives, the round goes on, the liar alone pays, and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from fl_bn.federation import schema
from fl_bn.flower import RunFailed
from tests.hostile.fuzz import fuzz, table
from tests.hostile.liars import LIAR, lied, sets
from tests.hostile.lies import TARGETS, lie_to_server
from tests.hostile.outcomes import BROKEN, REFUSED, Outcome, honest, judged
from tests.hostile.recorded import CLIENTS, SCENARIOS

MEMORY = 200.0  # MB: the largest mutated payload has some 4


def check(mutations: int, seed: int) -> None:
    tally = fuzz(mutations, seed)
    assert tally.broken == []
    assert tally.peak < MEMORY
    assert sum(tally.counts.values()) == mutations
    for target in TARGETS:
        assert tally.counts[target, REFUSED] > 0, table(tally)


def test_mutated_messages() -> None:
    check(800, seed=16)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_some_thousand() -> None:
    """The command makes 100,000: ``python -m tests.hostile.fuzz``."""
    check(3000, seed=17)


def test_a_client_that_calls_itself_another_is_refused_and_the_other_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    """It took the other's place, whose replies were then measured against what the liar had said."""
    lie = sets("query.hello", "hello", client=3)
    ran = lied(lie, "ln", policy={"nodes": tuple(range(1, CLIENTS + 1))})
    others = [client for client in range(CLIENTS) if client != LIAR]
    assert [[c.client for c in record.accepted] for record in ran.records] == [others] * 2
    assert "node 2 refused: it calls itself client 3, but its key is client 1's: correct its partition-id" in caplog.messages
    with pytest.raises(RunFailed, match="nodes 2 and 4 call themselves client 3, so none of them takes part"):  # control
        lied(lie, "ln")


@pytest.mark.parametrize("name", SCENARIOS)
def test_control_where_nobody_lies_everyone_counts(name: str) -> None:
    ran = honest(name)
    assert ran.record.aggregated
    assert [c.refused for c in ran.record.clients] == [""] * CLIENTS


def test_control_a_broken_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arrays are believed unchecked, the same mutations break it."""
    monkeypatch.setattr(schema.Schema, "check", lambda self, payload: None)
    outcomes = [lie_to_server("fedavg", np.random.default_rng([1, i]))[1] for i in range(150)]
    assert any(outcome.kind == BROKEN for outcome in outcomes)


def test_control_another_client_that_pays_is_found() -> None:
    ran = honest("fbn")
    assert judged("fbn", ran, []) == Outcome("accepted: no bit of the model changed", "")
    assert judged("fbn", ran, ["a line\nof two"]).kind == BROKEN
