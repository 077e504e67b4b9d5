"""Members that misbehave, under both policies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import grpc
import pytest
import torch

from fl_bn.exchange.grpc.service import FRAME, decode_answer
from tests.exchange.cohorts import ExchangeService, Join, Local, encode_request
from tests.exchange.over_grpc import (
    BROKE,
    KEYS,
    LARGEST,
    LAYERS,
    PATIENT,
    SECOND,
    SOON,
    Round,
    Stream,
    batch_of,
    check,
    eventually,
    expected,
    finish,
    local_of,
    same,
    within,
)


def second(*values: float) -> bytes:
    """Return the second request of client 2, with other values."""
    return encode_request(Local(SECOND, torch.tensor(values, dtype=torch.float64), 16))


class Misdeed(NamedTuple):
    """What client 2 does after the first exchange, or instead of joining, and words that are then said of it."""

    act: Callable[[Stream], object] = lambda stream: None
    said: tuple[str, ...] = ()
    joins: bool = True
    compressed: bool = False
    told: bool = False  # client 2 gets the same text


def sends(request: bytes, *said: str, **how: bool) -> Misdeed:
    return Misdeed(lambda stream: stream.send(request), said, **how)


LAYER = "block.bn"
MISDEEDS = {
    "NaN": sends(second(1.0, float("nan"), 1.0), LAYER, "nan", told=True),
    "another layer": sends(encode_request(local_of(2, KEYS[5])), LAYER, str(KEYS[5]), told=True),
    "garbage": sends(b"\xff" * 99, "99", told=True),
    "oversized by a byte": sends(bytes(LARGEST + FRAME + 1), BROKE),
    "oversized when unpacked": sends(second(*[0.0] * (3 << 17)), compressed=True),
    "half-closed": Misdeed(lambda stream: stream.end(), (BROKE,)),
    "channel closed": Misdeed(lambda stream: stream.channel.close(), (BROKE,)),
    "cancelled": Misdeed(lambda stream: stream.call.cancel(), (BROKE,)),
    "silent": Misdeed(said=(LAYER, "0.5 s")),
    "silent at once": Misdeed(said=("join", "0.5 s"), joins=False),
}


def misbehave(round: Round, misdeed: Misdeed, stack: ExitStack) -> Stream:
    """Client 2 takes part in the first exchange, unless it does not join, and then does its deed."""
    stream = stack.enter_context(Stream(round.service, round.tokens[2], misdeed.compressed))
    if misdeed.joins:
        stream.ask(Join(batch_of(2)))
        assert same(decode_answer(stream.ask(local_of(2, KEYS[0])), torch.float32), expected(round.clients, KEYS[0]))
    else:
        eventually(lambda: round.service._members[round.tokens[2]].context is not None)
    misdeed.act(stream)
    return stream


def deadlines(kind: str) -> dict[str, float]:
    short = {"silent": "deadline", "silent at once": "join_deadline"}
    return PATIENT | ({short[kind]: 0.5} if kind in short else {})


@pytest.mark.sample(3)
@pytest.mark.parametrize("policy", ["shrink", "abort"])
@pytest.mark.parametrize("kind", MISDEEDS)
def test_under_shrink_the_others_go_on_with_weights_over_them_and_under_abort_all_fail_at_once(
    kind: str, policy: str, service: ExchangeService, log: pytest.LogCaptureFixture
) -> None:
    """Who misbehaved is told why. The next round works."""
    misdeed, goes_on = MISDEEDS[kind], policy == "shrink"
    with within(), ExitStack() as stack, Round(service, policy=policy, **deadlines(kind)) as round:
        futures = round.play(0, 1)
        stream = misbehave(round, misdeed, stack)
        errors = [future.exception(SOON) for future in futures]
        why = round.session.dropped[2]
        assert all(word in why for word in misdeed.said), why
        assert f"exchange: client 2: {why}" in log.text
        if goes_on:
            before = 1 if misdeed.joins else 0
            check([future.result()[:before] for future in futures], {0, 1, 2}, KEYS[:before])
            check([future.result()[before:] for future in futures], {0, 1}, KEYS[before:])
        else:
            assert round.session.failure == f"client 2: {why}"
            assert all(f"ABORTED: client 2: {why}" in str(error) for error in errors)
        if misdeed.told and goes_on:
            assert stream.outcome() == (grpc.StatusCode.ABORTED, why)
        round.__exit__()  # the stream of a silent member ends with its round at the latest, or costs a socket for ever
        eventually(lambda: not stream.call.is_active(), seconds=2)
    assert list(round.session.dropped) == [2]
    finish(service)
    assert "asyncio" not in {record.name for record in log.records}  # such as forgotten tasks


def test_who_behaves_in_the_same_harness_is_averaged(service: ExchangeService, log: pytest.LogCaptureFixture) -> None:
    """Negative control: a client of raw bytes that misbehaves in nothing."""
    with within(), ExitStack() as stack, Round(service, deadline=0.5, join_deadline=0.5) as round:
        futures = round.play(0, 1)
        stream = misbehave(round, Misdeed(), stack)
        for key in KEYS[1:]:
            assert same(decode_answer(stream.ask(local_of(2, key)), LAYERS[key.layer].dtype), expected(round.clients, key))
        stream.send(encode_request(None))
        stream.end()
        assert stream.outcome() == (grpc.StatusCode.OK, "")
        check([future.result(SOON) for future in futures], round.clients)
    assert log.text == ""
    assert round.session.dropped == {}
