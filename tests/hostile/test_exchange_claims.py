"""FedTAN and a client that lies about its batch and its activations: a batch above its samples is refused, a defence believes nobody."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fl_bn.exchange.call import Join, Local, Request
from fl_bn.exchange.session import Deliver, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.defence import Defence
from tests.costs import slow
from tests.flower.byzantine import ROBUST, RULES
from tests.hostile.liars import LIAR, lied, people, sets
from tests.in_process import Run, identical

HUGE = 2**50
BOASTS = sets("query.hello", "hello", samples=HUGE)  # so that no batch is above what it has
HONEST = sets("query.hello", "hello")
policies = pytest.mark.parametrize("policy", ["abort", "shrink"])
any_policy = pytest.mark.parametrize("policy", [slow("abort"), "shrink"])


def lies(monkeypatch: pytest.MonkeyPatch, batch: int = 0, count: int = 0, size: float = 1.0) -> None:
    """In every session ``LIAR`` announces ``batch``, counts ``count`` activations, and sends its values times ``size``."""
    submit = Session.submit

    def lie(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        if client == LIAR and isinstance(request, Join) and batch:
            request = Join(batch)
        elif client == LIAR and isinstance(request, Local):
            request = replace(request, count=count or request.count, values=request.values * size)
        submit(self, client, request, deliver)

    monkeypatch.setattr(Session, "submit", lie)


def fedtan(spoil=HONEST, policy: str = "shrink", rule: str = "", carrier: str = "local", rounds: int = 2) -> Run:  # type: ignore[no-untyped-def]
    rules = {"exchange": ExchangeSettings(carrier, policy)}
    defence = Defence(1, rule, rule) if rule else Defence()
    return lied(spoil, "fedtan", people(), rounds, policy=rules, defence=defence, may_fail=policy == "abort")


@cache
def honest(rule: str) -> Run:
    return fedtan(rule=rule)


def largest(ran: Run) -> float:
    return max(float(np.abs(array).max()) for array in ran.trajectory[2].values())


@policies
@pytest.mark.parametrize("carrier", ["local", "replay"])
@pytest.mark.parametrize("rule", ["", "nnm+median"])
def test_a_batch_above_a_client_s_own_samples_is_refused_by_name(
    rule: str, carrier: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = honest(rule)
    lies(monkeypatch, batch=HUGE)
    ran = fedtan(policy=policy, rule=rule, carrier=carrier)
    reason = f"expected a batch of 0 to 6 samples, as many as the client reported to have, but got {HUGE}"
    for record in ran.records:
        assert reason in record.clients[LIAR].refused
        assert record.aggregated == (policy == "shrink")
    if policy == "shrink":
        assert largest(ran) < 2 * largest(alone)


@any_policy
@pytest.mark.parametrize("rule", RULES)
def test_under_a_defence_claims_change_no_bit(rule: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = honest(rule)
    lies(monkeypatch, batch=HUGE, count=HUGE)
    claimed = fedtan(BOASTS, policy, rule)
    assert all(len(record.accepted) == 5 for record in claimed.records)
    assert identical(claimed.trajectory[2], alone.trajectory[2])


@any_policy
@pytest.mark.parametrize("rule", ROBUST)
def test_under_a_defence_the_model_stays_within_the_honest_range(rule: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = honest(rule)
    lies(monkeypatch, batch=HUGE, count=1, size=1e9)
    lied_to = fedtan(BOASTS, policy, rule)
    assert all(record.aggregated for record in lied_to.records)
    assert largest(lied_to) < 2 * largest(alone)


def test_control_without_a_defence_claims_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that also boasts of its samples is believed: that is what weighting by batches means."""
    alone = honest("")
    lies(monkeypatch, batch=HUGE, count=HUGE)
    assert not identical(fedtan(BOASTS).trajectory[2], alone.trajectory[2])
