"""FedTAN and a client that asks once too often, or sends what nobody can train with: it alone is lost.

Over gRPC: tests/exchange/test_grpc_lies.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_bn.exchange.call import Key, Local, Quantity, Request
from fl_bn.exchange.session import Deliver, Session
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.defence import Defence
from tests.hostile.liars import LIAR, lied, people
from tests.in_process import Run

GRADIENTS, MOMENTS = Quantity.GRADIENTS, Quantity.MOMENTS
VALUES = [(GRADIENTS, 1e6), (GRADIENTS, 1e12), (GRADIENTS, 1e20), (GRADIENTS, 3e38), (MOMENTS, 1e30), (MOMENTS, 1.6e38)]


def fedtan(clients: int, policy: str = "shrink", rule: str = "", rounds: int = 2) -> Run:
    rules = {"exchange": ExchangeSettings("local", policy)}
    defence = Defence(1, rule, rule) if rule else Defence()
    return lied(lambda *of: None, "fedtan", people(clients), rounds, policy=rules, defence=defence, may_fail=policy == "abort")


@pytest.mark.parametrize("clients", [3, 5])
@pytest.mark.parametrize(("quantity", "value"), VALUES, ids=str)
def test_no_finite_value_ends_an_undefended_run(quantity: Quantity, value: float, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of moments, all variances. What is within the bounds is believed, and the run goes on; else its sender alone is left out."""
    submit = Session.submit

    def lie(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        if client == LIAR and isinstance(request, Local) and request.key.quantity is quantity:
            values = request.values.clone()
            values[0 if quantity is GRADIENTS else len(values) // 2 :] = value
            request = replace(request, values=values)
        submit(self, client, request, deliver)

    monkeypatch.setattr(Session, "submit", lie)
    ran = fedtan(clients)
    assert all(record.aggregated for record in ran.records)
    lost = {LIAR} if quantity is GRADIENTS else set()
    assert [{c.client for c in record.clients if c.refused} for record in ran.records] == [lost] * 2
    assert all(bool(np.isfinite(array).all()) for array in ran.trajectory[2].values())


def asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the liar would leave, it sends one more request."""
    leave = Session.leave

    def more(self: Session, client: int, reason: str = "") -> None:
        if client == LIAR and not reason and client in self._waiting:
            return
        if client == LIAR and not reason and client in self.taking_part:
            layer, (channels, dtype) = next(iter(self.layers.items()))
            self.submit(client, Local(Key(layer, MOMENTS, 1), torch.ones(2 * channels, dtype=dtype), 1), lambda outcome: None)
            return
        leave(self, client, reason)

    monkeypatch.setattr(Session, "leave", more)


@pytest.mark.parametrize(("clients", "rule"), [(3, ""), (5, ""), (5, "nnm+median")])
@pytest.mark.parametrize("policy", ["abort", "shrink"])
def test_one_request_too_many_costs_its_sender_alone(clients: int, policy: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asks_again(monkeypatch)
    ran = fedtan(clients, policy, rule)
    for record in ran.records:
        assert record.aggregated == (policy == "shrink")
        if policy == "shrink":
            assert [c.client for c in record.clients if c.refused] == [LIAR]
            assert "most clients have finished the round" in record.clients[LIAR].refused
        else:
            assert all(f"client {LIAR}: " in c.refused or c.client == LIAR for c in record.clients if c.refused)
