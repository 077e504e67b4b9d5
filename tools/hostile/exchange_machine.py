"""Test the session of an exchange by a state machine: honest clients, and one liar that sends any request in any order.

The session may drop only the liar, and no failure may name an honest client.
"""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Refused, Request
from fl_bn.exchange.grpc.service import decode_request, encode_request
from fl_bn.exchange.session import LARGEST_COUNT, POLICIES, Session
from fl_bn.federation.aggregation import Defence
from tests.exchange.cohorts import GRADIENTS, LAYERS, MEAN, MOMENTS, NARROW, VARIANCE, WIDE, Outcome
from tools.hostile.mutations import edges, flipped, pick

MERGED = (
    Key(WIDE, MOMENTS),
    Key(NARROW, MOMENTS),
    Key(WIDE, MOMENTS, 1),
    Key(WIDE, GRADIENTS, 1),
    Key(NARROW, GRADIENTS),
    Key(WIDE, GRADIENTS),
)
PAPER = (Key(WIDE, MEAN), Key(WIDE, VARIANCE), Key(NARROW, MEAN), Key(NARROW, VARIANCE), Key(NARROW, GRADIENTS), Key(WIDE, GRADIENTS))


class Exchange(RuleBasedStateMachine):
    """Simulate the clients of one session. The client ``liar`` does anything.

    The honest clients join, send a request for each of ``keys`` after the answer to the one before, and leave.
    """

    @initialize(
        clients=st.integers(3, 7),
        liar=st.integers(0, 6),
        policy=st.sampled_from(POLICIES),
        keys=st.sampled_from([MERGED, PAPER]),
        layers=st.integers(0, 6),
        robust=st.booleans(),
        met=st.booleans(),
        patience=st.integers(0, 8),
    )
    def begin(
        self, clients: int, liar: int, policy: str, keys: tuple[Key, ...], layers: int, robust: bool, met: bool, patience: int
    ) -> None:
        options: dict[str, Any] = {"average": Defence(1, "median", "median").average, "believing": False} if robust else {}
        self.session = Session(range(clients), LAYERS, policy=policy, **options)
        self.liar, self.keys, self.policy = liar % clients, keys[:layers], policy
        self.honest = [client for client in range(clients) if client != self.liar]
        self.got: dict[int, list[Outcome]] = {client: [] for client in self.honest}
        self.left: set[int] = set()
        self.patience = patience  # the liar's first requests, so many, are those of an honest client
        if met:
            self.the_liar_does_as_the_others(early=True, waits=False)
            self.all_honest_clients_go_on()

    @rule(who=st.integers(0, 5))
    def an_honest_client_goes_on(self, who: int) -> None:
        client = self.honest[who % len(self.honest)]
        got = self.got[client]
        if client in self.left or (got and not got[-1]) or self.session.failure:
            return
        if len(got) == len(self.keys) + 1:
            self.left.add(client)
            self.session.leave(client)
            return
        outcome: Outcome = []
        got.append(outcome)
        self.session.submit(client, self.request(client, len(got) - 1), outcome.append)

    def request(self, client: int, step: int) -> Request:
        if step == 0:
            return Join(client + 1)
        key = self.keys[step - 1]
        layer = LAYERS[key.layer]
        return Local(key, torch.full((key.quantity.width(layer.channels),), 1.0 + client, dtype=layer.dtype), client + 1)

    @rule()
    def all_honest_clients_go_on(self) -> None:
        for who in range(len(self.honest)):
            self.an_honest_client_goes_on(who)

    @rule(early=st.booleans(), waits=st.booleans())
    def the_liar_does_as_the_others(self, early: bool, waits: bool) -> None:
        """Send a request as an honest client would.

        Args:
            early: True: the request that the others send next. False: the one that they sent last.
            waits: True: afterwards, the exchange's deadline passes before the others go on.
        """
        self.patience -= 1
        step = max(len(got) for got in self.got.values()) + early
        if step <= len(self.keys) + 1:
            self.session.submit(self.liar, self.request(self.liar, max(step - 1, 0)), lambda outcome: None)
        if waits and self.in_step():
            self.time_passes()

    @precondition(lambda self: self.patience <= 0)
    @rule(step=st.integers(0, 6), in_bytes=st.booleans(), seed=st.integers(0, 2**32))
    def the_liar_sends_something_else(self, step: int, in_bytes: bool, seed: int) -> None:
        """Send any request, with other bytes or with values at the edges. It is decoded as the exchange's service does it."""
        rng, request = np.random.default_rng(seed), self.request(self.liar, min(step, len(self.keys)))
        if not in_bytes and isinstance(request, Local):
            values = np.frombuffer(edges(np.dtype("float32"), 4 * len(request.values), rng), np.float32)
            count = int(pick(rng, [1, 5, 0, -1, LARGEST_COUNT]))
            asked = Local(request.key, torch.from_numpy(values.copy()).to(request.values.dtype), count)
            self.session.submit(self.liar, asked, lambda outcome: None)
            return
        try:
            honest = encode_request(request)
            head, _, values = honest.partition(b"\n")
            fields = json.loads(head)
            fields[pick(rng, [*fields, "join", "leave", "more"])] = pick(rng, [None, 1, -1, 2**70, 1.5, True, "", "mean", [], [[1]], {}])
            others = [
                json.dumps(fields).encode() + b"\n" + values,
                head + b"\n" + values[:-1],
                flipped(honest, rng),
                honest + bytes(8),
                b"",
            ]
            changed = decode_request(pick(rng, others), LAYERS)
        except Refused as refusal:
            self.session.leave(self.liar, f"refused: {refusal}")
            return
        if changed is None:
            self.session.leave(self.liar)
        else:
            self.session.submit(self.liar, changed, lambda outcome: None)

    @precondition(lambda self: self.patience <= 0)
    @rule(reason=st.sampled_from(["", "", "out of memory"]))
    def the_liar_leaves(self, reason: str) -> None:
        self.session.leave(self.liar, reason)

    @precondition(lambda self: self.in_step())
    @rule()
    def time_passes(self) -> None:
        """Let the exchange's deadline pass. Meanwhile, either all honest clients train, or all of them wait for the liar."""
        before, self.session.deadline = self.session.deadline, -1.0
        self.session.expire()
        self.session.deadline = before

    def in_step(self) -> bool:
        return (
            hasattr(self, "session")
            and bool(self.session.batches)
            and len({(len(got), bool(got and got[-1])) for got in self.got.values()}) == 1
        )

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def only_the_liar_is_lost(self) -> None:
        assert set(self.session.dropped) <= {self.liar}, self.session.dropped
        if self.session.failure:
            assert self.policy == "abort", self.session.failure  # most clients (2 or more of at least 3) are honest: no tie
            assert self.session.failure.startswith(f"client {self.liar}: ")
            assert "\n" not in self.session.failure
        for got in self.got.values():
            for outcome in got:
                assert len(outcome) <= 1
                if outcome and isinstance(outcome[0], ExchangeFailed):
                    assert str(outcome[0]) == self.session.failure != ""
                elif outcome and isinstance(outcome[0], Answer):
                    assert bool(outcome[0].values.isfinite().all())

    def teardown(self) -> None:
        """Let the honest clients finish. Check that they got all their answers, and that none of them was dropped."""
        if not hasattr(self, "session"):
            return
        self.session.leave(self.liar, "its stream broke")
        for _ in range(len(self.keys) + 2):
            self.all_honest_clients_go_on()
        self.only_the_liar_is_lost()
        if self.policy == "abort" and self.session.failure:
            return
        for step in range(len(self.keys) + 1):
            widths = {
                len(outcome[0].values) for client in self.honest for outcome in [self.got[client][step]] if isinstance(outcome[0], Answer)
            }
            assert widths == {0 if step == 0 else self.keys[step - 1].quantity.width(LAYERS[self.keys[step - 1].layer].channels)}
        assert set(self.honest) <= set(self.session.taking_part)
        assert self.left == set(self.honest)
