"""Strangers at the service: refused, said in the log, and a round under ``abort`` goes on as if they had not come."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from tests.exchange.over_grpc import (
    HOST,
    JOIN,
    SECOND,
    SOON,
    Round,
    Stream,
    address_of,
    check,
    finish,
    local_of,
    play,
    within,
)

pytestmark = pytest.mark.usefixtures("log")


def refusal(service: ExchangeService, token: str | None, *messages: bytes) -> tuple[grpc.StatusCode, str]:
    with Stream(service, token) as stream:
        for message in messages:
            stream.send(message)
        return stream.outcome()


UNKNOWN, TWICE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.ALREADY_EXISTS
STRANGERS: dict[str, tuple[str | None, tuple[bytes, ...], grpc.StatusCode, str]] = {
    "no token": (None, (JOIN,), UNKNOWN, "refused a connection from ipv4:127.0.0.1:[0-9]+: it sent no token"),
    "empty token": ("", (JOIN,), UNKNOWN, "refused a connection from .*: it sent no token"),
    "unknown token": ("0" * 64, (JOIN,), UNKNOWN, "refused a connection from ipv4:127.0.0.1:[0-9]+: its token is not one of this round's"),
    "token of a past round": ("past", (JOIN,), UNKNOWN, "refused a connection from .*: its token is not one of this round's"),
    "token in use": ("used", (JOIN,), TWICE, "refused a second connection with the token of client 0, from ipv4:127.0.0.1"),
    "token in use, and garbage": (
        "used",
        (b"\xff" * 99,),
        TWICE,
        "refused a second connection with the token of client 0, from ipv4:127.0.0.1",
    ),
    "garbage": (None, (b"\xff" * 99,), UNKNOWN, "refused a connection from .*: it sent no token"),
    "oversized": (None, (bytes(16 << 20),), UNKNOWN, "refused a connection from .*: it sent no token"),
    "nothing sent": (None, (), UNKNOWN, "refused a connection from .*: it sent no token"),
    "nothing sent with an unknown token": ("0", (), UNKNOWN, "refused a connection from .*: its token is not one of this round's"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_refused_and_named_while_the_round_goes_on(
    kind: str, service: ExchangeService, log: pytest.LogCaptureFixture
) -> None:
    token, messages, code, said = STRANGERS[kind]
    with Round(service) as past:
        pass
    with within(), Round(service) as round:
        waiting = round.play(0, 1)
        round.joined(0, 1)
        chosen = {"past": past.tokens[0], "used": round.tokens[0]}.get(token or "", token)
        came, details = refusal(service, chosen, *messages)
        check([future.result(SOON) for future in [*waiting, *round.play(2)]], round.clients)
    assert came is code or (kind == "oversized" and came is grpc.StatusCode.RESOURCE_EXHAUSTED)  # whichever is noticed first
    assert round.tokens[0] not in details + log.text
    assert re.search(f"exchange: {said}", log.text) or came is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tokens_cannot_be_guessed_and_are_of_one_round_each(service: ExchangeService) -> None:
    tokens: list[str] = []
    for _ in range(10):
        with Round(service, 10) as round:
            tokens += round.tokens.values()
    assert len(set(tokens)) == 100
    assert all(len(bytes.fromhex(token)) == 32 for token in tokens)


def test_a_token_works_for_one_stream_even_after_that_has_ended(service: ExchangeService) -> None:
    with within(), Round(service, 1) as round:
        check([play(address_of(service), round.tokens[0], 0)], [0])
        with pytest.raises(ExchangeFailed, match="ALREADY_EXISTS: client 0 has joined already"):
            play(address_of(service), round.tokens[0], 0)


def test_a_late_client_of_a_past_round_is_told_so(service: ExchangeService) -> None:
    with Round(service, 1) as round:
        exchange = GrpcExchange(address_of(service), round.tokens[0], 1)
    finish(service)
    with within(), pytest.raises(ExchangeFailed, match="the round is over"):
        exchange(SECOND, local_of(0, SECOND).values, 1)
    exchange.close("late")


def test_hundreds_of_strangers_at_once_do_not_hold_the_round_up(service: ExchangeService, log: pytest.LogCaptureFixture) -> None:
    number, begun = 300, threading.Event()
    codes: list[grpc.StatusCode] = []

    def stranger(first: int) -> None:
        with ExitStack() as stack:
            streams = [stack.enter_context(Stream(service, None if i % 2 else f"{i:064x}")) for i in range(first, first + 30)]
            begun.set()
            for stream in streams:
                stream.send(JOIN)
            codes.extend(stream.outcome()[0] for stream in streams)

    with within(), Round(service) as round, ThreadPoolExecutor(10) as pool:
        crowd = [pool.submit(stranger, first) for first in range(0, number, 30)]
        begun.wait(SOON)
        check([future.result(SOON) for future in round.play(*round.clients)], round.clients)
        for part in crowd:
            part.result(SOON)
    assert codes == [UNKNOWN] * number
    assert 10 <= log.text.count("exchange: refused a connection from") <= 20  # nobody fills the log by knocking
    assert f"(refusal {number} of this round)" in log.text


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(range(256)) * 64], ids=len)
def test_connections_that_do_not_speak_grpc_change_nothing(service: ExchangeService, said: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection((HOST, service.port))).sendall(said)
        finish(service)
