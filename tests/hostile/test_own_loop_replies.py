"""Replies to a loop of one's own that no client makes: each costs its sender alone, and is named in the record or in the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fl_bn import convert, local_round, methods, server_round, server_state
from fl_bn.federation.server import Server
from fl_bn.methods import Method
from tests.equivalence.product import train
from tests.equivalence.row import Row, make_clients
from tests.hostile.liars import Reply
from tests.listed import listed

CLIENTS, LIAR = 5, 1
ROW = Row("replies", {}, {}, clients=make_clients(6, 6, 6, 6, 6))


def reply_of(state: Server, client: int, method: Method) -> Reply:
    with local_round(convert(ROW.net(), method), method, state.instruction()) as round:
        train(ROW, round, ROW.steps[client])
    reply, _ = round.reply(ROW.sizes[client], 1.0, client=client)
    return reply


@cache
def started(make: Callable[[], Method] = methods.fedavg, rounds: int = 1) -> tuple[Server, tuple[Reply, ...]]:
    """A server after so many honest rounds, and the honest replies to the next one."""
    state, method = server_state(ROW.net(), make(), rounds=4, clients=CLIENTS), make()
    for _ in range(rounds):
        state, record = server_round(state, [reply_of(state, client, method) for client in range(CLIENTS)])
        assert record.aggregated
    return state, tuple(reply_of(state, client, method) for client in range(CLIENTS))


W = torch.zeros(4, 3, 3, 3, dtype=torch.float64)


def first(other: Any) -> Callable[[Reply], Reply]:
    """The first tensor of the reply is something else."""
    return lambda reply: replace(reply, sections=reply.sections | {"weights": reply.sections["weights"] | {"0.weight": other}})


def told(**metrics: Any) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, metrics=reply.metrics | metrics)


def earlier(reply: Reply) -> Reply:
    """The client's own reply to round 1."""
    return started(methods.fedavg, 0)[1][reply.client]


NO_REPLY: dict[str, tuple[Callable[[Reply], Any], str]] = {  # and how the refusal begins
    "weight=-32": (lambda r: replace(r, weight=-32), "metrics/weight: "),
    "samples=-5": (lambda r: replace(r, samples=-5, weight=-5), "metrics/samples: "),
    "loss of text": (told(loss="low"), "metrics/loss: "),
    "metrics a list": (lambda r: replace(r, metrics=[1.0]), "metrics: "),  # type: ignore[arg-type]
    "of round 1": (earlier, "reply/round: "),
    "of FixBN": (lambda r: started(methods.fixbn)[1][r.client], "reply/signature: "),  # the same tensors
    "a list": (first(W.tolist()), "weights/0.weight: "),
    "sparse": (first(W.to_sparse()), "weights/0.weight: "),
    "complex": (first(torch.complex(W, W).conj()), "weights"),
    "bfloat16": (first(W.bfloat16()), "tensor/0.weight: "),
    "sections a list": (lambda r: replace(r, sections=[W]), "reply/sections: "),  # type: ignore[arg-type]
    "a section of a tensor": (lambda r: replace(r, sections={"weights": W}), "reply/weights: "),  # type: ignore[dict-item]
    "client 77 of 5": (lambda r: replace(r, client=77), "client 77"),
    "client a list": (lambda r: replace(r, client=[1]), "0..4"),  # type: ignore[arg-type]
    "reply and kept": (lambda r: (r, None), "tuple"),
}


@listed("case", NO_REPLY)
def test_what_no_client_sends_costs_its_sender_the_reply(case: str, log: pytest.LogCaptureFixture) -> None:
    """What is no client's reply at all is named in the log."""
    (state, honest), (change, begins) = started(), NO_REPLY[case]
    assert len(server_round(state, honest)[1].accepted) == CLIENTS  # control
    replies = [change(reply) if reply.client == LIAR else reply for reply in honest]
    after, record = server_round(state, replies)
    assert [c.client for c in record.accepted] == [0, 2, 3, 4]
    said = [c.refused for c in record.clients if c.refused] or [line for line in log.messages if begins in line]
    assert begins in said[0]
    assert len(said[0]) < 500
    want, _ = server_round(state, [reply for reply in honest if reply.client != LIAR])
    assert all(torch.equal(tensor, want.shared.tensors()[name]) for name, tensor in after.shared.tensors().items())
