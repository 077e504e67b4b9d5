"""The service with real clients that behave, in plaintext and under TLS."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_bn.exchange.call import ExchangeFailed, Key, Layer, Quantity
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.exchange.grpc.service import ExchangeService
from fl_bn.exchange.session import Session
from fl_bn.exchange.settings import Certificates
from tests.exchange.certificates import make_certificates
from tests.exchange.over_grpc import (
    BROKE,
    HOST,
    KEYS,
    LARGEST,
    PATIENT,
    SECOND,
    SOON,
    Round,
    address_of,
    batch_of,
    check,
    expected,
    finish,
    local_of,
    play,
    same,
    within,
)

pytestmark = pytest.mark.usefixtures("log")


# Honest clients


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_all_get_what_reduce_makes_of_their_values(service: ExchangeService, clients: int) -> None:
    finish(service, clients)


def test_averages_over_other_members_differ() -> None:
    """Negative control of ``check``: what it compares tells cohorts and keys apart."""
    for key in KEYS:
        assert same(expected(range(3), key), expected(range(3), key))
        assert not same(expected(range(3), key), expected(range(2), key))
    assert not same(expected(range(3), KEYS[0]), expected(range(3), KEYS[3]))


def test_one_service_serves_many_rounds_and_forgets_them(service: ExchangeService, log: pytest.LogCaptureFixture) -> None:
    for clients in (3, 1, 4, 2) * 3:
        finish(service, clients)
    assert not service._tickets
    assert not service._streams
    assert log.text == ""


def test_sessions_at_the_same_time_do_not_mix(service: ExchangeService) -> None:
    with within(), Round(service, 2) as first, Round(service, 3) as second:
        several = [(round, round.play(*round.clients)) for round in (first, second)]
        for round, futures in several:
            check([future.result(SOON) for future in futures], round.clients)


def test_two_services_in_one_process_do_not_disturb_each_other(service: ExchangeService) -> None:
    other = ExchangeService(HOST, 0, LARGEST).start()
    try:
        with within(), Round(service) as first, Round(other) as second:
            for round, futures in [(round, round.play(*round.clients)) for round in (first, second)]:
                check([future.result(SOON) for future in futures], round.clients)
    finally:
        other.stop()
    finish(service)


def test_who_announces_no_samples_sits_the_round_out(service: ExchangeService) -> None:
    with within(), Round(service) as round:
        futures = round.play(0, 2)
        out = GrpcExchange(address_of(service), round.tokens[1], 0)
        check([future.result(SOON) for future in futures], {0, 2})
        with pytest.raises(ExchangeFailed, match="this client takes no part in the round"):
            out(SECOND, local_of(1, SECOND).values, 1)
        out.close()


def test_a_client_knows_how_long_it_waited(service: ExchangeService) -> None:
    with Round(service, 2) as round:
        (future,) = round.play(0)
        round.joined(0)
        time.sleep(0.2)
        late = GrpcExchange(address_of(service), round.tokens[1], batch_of(1))
        assert late.seconds < 0.2
        late.close("it leaves")
        with pytest.raises(ExchangeFailed, match=f"client 1: {BROKE}"):
            future.result(SOON)


def test_values_as_long_as_the_longest_layer_pass_with_a_name_of_some_kilobytes() -> None:
    layers = {"b" * 4000: Layer(20_000, torch.float64)}
    (name,) = layers
    service = ExchangeService(HOST, 0, 2 * 8 * 20_000).start()
    try:
        session = Session([0], layers, **PATIENT)
        exchange = GrpcExchange(address_of(service), service.open(session)[0], 1)
        values = torch.linspace(0, 1, 40_000, dtype=torch.float64)
        assert torch.equal(exchange(Key(name, Quantity.GRADIENTS), values, 1).values, values)
        exchange.close()
    finally:
        service.stop()


def test_closing_twice_is_harmless_and_a_closed_exchange_answers_no_more(service: ExchangeService) -> None:
    with within(), Round(service, 1) as round:
        exchange = GrpcExchange(address_of(service), round.tokens[0], 1)
        exchange.close()
        exchange.close()
        exchange.close("an error")
        with pytest.raises(ExchangeFailed, match="ended before it answered"):
            exchange(SECOND, local_of(0, SECOND).values, 1)
        assert round.session.dropped == {}


# TLS


@pytest.mark.parametrize("host", [HOST, "localhost"])
def test_a_round_over_tls(secure: ExchangeService, certificates: Certificates, host: str) -> None:
    authority = certificates.authority.read_bytes()
    finish(secure, authority=authority)
    with Round(secure, 1) as round:
        check([play(f"{host}:{secure.port}", round.tokens[0], 0, authority)], [0])


@pytest.mark.parametrize("kind", ["plaintext to TLS", "another authority", "TLS to plaintext", "no certificate at all"])
def test_who_does_not_trust_the_service_does_not_talk_to_it(
    kind: str, secure: ExchangeService, service: ExchangeService, certificates: Certificates, tmp_path: Path
) -> None:
    authority, met = {
        "plaintext to TLS": (b"", secure),
        "another authority": (make_certificates(tmp_path).authority.read_bytes(), secure),
        "TLS to plaintext": (certificates.authority.read_bytes(), service),
        "no certificate at all": (b"spam", secure),
    }[kind]
    with within(), Round(met, 1) as round:
        with pytest.raises(ExchangeFailed, match=f"the exchange at {address_of(met)} failed: UNAVAILABLE"):
            play(address_of(met), round.tokens[0], 0, authority)
        assert not met._streams  # the token was not shown
        good = certificates.authority.read_bytes() if met is secure else b""
        check([play(address_of(met), round.tokens[0], 0, good)], [0])  # control: so the same token still works


def test_authorities_do_not_vouch_for_servers_elsewhere(secure: ExchangeService, certificates: Certificates) -> None:
    """The certificate names localhost and 127.0.0.1, and the client holds the server to that."""
    with within(), Round(secure, 1) as round, pytest.raises(ExchangeFailed, match="UNAVAILABLE"):
        play(f"127.0.0.2:{secure.port}", round.tokens[0], 0, certificates.authority.read_bytes())


def test_a_key_of_another_certificate_is_named(certificates: Certificates, tmp_path: Path) -> None:
    key = make_certificates(tmp_path).key
    said = f"its private key and its authority's certificate, all in PEM, in .*{re.escape(str(key))} .*mismatch"
    with pytest.raises(ValueError, match=said):
        ExchangeService(HOST, 0, LARGEST, replace(certificates, key=key))
