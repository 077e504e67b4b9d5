"""The service with real clients that behave, in plaintext and under TLS, and strangers at its port."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import grpc
import pytest

from tests.exchange.certificates import make_certificates
from tests.exchange.cohorts import Certificates, ExchangeFailed, ExchangeService, GrpcExchange
from tests.exchange.over_grpc import HOST, JOIN, LARGEST, SOON, Round, Stream, address_of, check, eventually, finish, play, within
from tests.listed import listed
from tests.refusals import naming


def test_sessions_at_the_same_time_get_what_reduce_makes_of_their_values_and_do_not_mix(service: ExchangeService) -> None:
    with within(), Round(service, 1) as one, Round(service, 2) as first, Round(service, 5) as second:
        for round, futures in [(round, round.play(*round.clients)) for round in (one, first, second)]:
            check([future.result(SOON) for future in futures], round.clients)


def test_a_round_over_tls(secure: ExchangeService, certificates: Certificates) -> None:
    authority = certificates.authority.read_bytes()
    finish(secure, authority=authority)
    with Round(secure, 1) as round:
        check([play(f"localhost:{secure.port}", round.tokens[0], 0, authority)], [0])


@pytest.mark.parametrize("kind", ["plaintext to TLS", "another authority", "TLS to plaintext", "no certificate", "another host"])
def test_who_does_not_trust_the_service_does_not_talk_to_it(
    kind: str, secure: ExchangeService, service: ExchangeService, certificates: Certificates, tmp_path: Path
) -> None:
    """The certificate names localhost and 127.0.0.1, and the client holds the server to that."""
    ours = certificates.authority.read_bytes()
    authority, met = {
        "plaintext to TLS": (b"", secure),
        "another authority": (make_certificates(tmp_path).authority.read_bytes(), secure),
        "TLS to plaintext": (ours, service),
        "no certificate": (b"spam", secure),
        "another host": (ours, secure),
    }[kind]
    with within(), Round(met, 1) as round:
        with pytest.raises(ExchangeFailed):
            play(address_of(met) if kind != "another host" else f"127.0.0.2:{met.port}", round.tokens[0], 0, authority)
        assert met._members[round.tokens[0]].context is None  # the token was not shown
        check([play(address_of(met), round.tokens[0], 0, ours if met is secure else b"")], [0])  # control: so the same token still works


UNKNOWN, TWICE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.ALREADY_EXISTS
STRANGERS: dict[str, tuple[str | None, tuple[bytes, ...], grpc.StatusCode, str]] = {
    "no token": (None, (JOIN,), UNKNOWN, "no token"),
    "unknown token": ("0" * 64, (JOIN,), UNKNOWN, "not one of this round's"),
    "token of a past round": ("past", (JOIN,), UNKNOWN, "not one of this round's"),
    "token in use": ("used", (JOIN,), TWICE, "the token of client 0"),
    "oversized": (None, (bytes(16 << 20),), UNKNOWN, ""),
    "nothing sent": (None, (), UNKNOWN, "no token"),
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
        with Stream(service, chosen) as stream:
            for message in messages:
                stream.send(message)
            came, details = stream.outcome()
        check([future.result(SOON) for future in [*waiting, *round.play(2)]], round.clients)
    assert came is code or (kind == "oversized" and came is grpc.StatusCode.RESOURCE_EXHAUSTED)  # whichever is noticed first
    assert round.tokens[0] not in details + log.text
    assert said in log.text
    assert "ipv4:127.0.0.1:" in log.text or kind == "oversized"


def test_a_port_in_use_and_an_address_of_another_machine_are_refused_and_named(service: ExchangeService) -> None:
    before = threading.active_count()
    for host, port in ((HOST, service.port), ("203.0.113.7", 0)):
        with within(), naming(f"{host}:{port}", OSError):
            ExchangeService(host, port, LARGEST).start()
    eventually(lambda: threading.active_count() <= before)
    finish(service)  # it is not disturbed


@listed("kind", ["nobody listens", "a host that nobody knows", "a server that never speaks"])
def test_where_no_service_answers_a_client_fails_in_time_and_names_the_address(kind: str) -> None:
    with socket.socket() as unused, socket.create_server((HOST, 0)) as mute, within():
        unused.bind((HOST, 0))  # but it does not listen
        ports = {"nobody listens": unused.getsockname()[1], "a server that never speaks": mute.getsockname()[1]}
        address = f"{HOST}:{ports[kind]}" if kind in ports else "no-such-host.invalid:1"
        with naming(address, ExchangeFailed):
            GrpcExchange(address, "token", 1, timeout=1)
