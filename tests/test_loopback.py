"""With a proxy in the environment, what this machine says to itself does not go through it: a listening socket stands in for the proxy."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import grpc
import pytest

from fl_bn.exchange.call import ExchangeFailed
from fl_bn.exchange.grpc.client import GrpcExchange
from fl_bn.support.loopback import EXCEPTIONS, direct, with_exceptions
from fl_bn_site.commands import environment
from tests.listed import listed

NOBODY = "127.0.0.1:9"  # nothing listens there
Asked = Callable[[], bool]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Whether the proxy that the environment names has a connection."""
    for name in ("grpc_proxy", "http_proxy", *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.5)
        monkeypatch.setenv("https_proxy", "http://{}:{}".format(*listening.getsockname()))

        def accepted() -> bool:
            try:
                listening.accept()[0].close()
            except TimeoutError:
                return False
            return True

        yield accepted


def knock(address: str) -> None:
    with grpc.insecure_channel(address) as channel, suppress(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=1)


@pytest.mark.slow
def test_fl_bn_and_programs_that_it_starts_reach_this_machine_without_the_proxy(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ExchangeFailed):
        GrpcExchange(NOBODY, "token", 1, timeout=1)
    assert not asked()
    for name in EXCEPTIONS:
        monkeypatch.delenv(name, raising=False)
    knock(NOBODY)
    assert asked(), "control: gRPC excepts no host by itself"
    for name in EXCEPTIONS:
        monkeypatch.setenv(name, environment({}).get(name, ""))
    for address in (NOBODY, "localhost:9", "[::1]:9", "127.0.0.53:9"):
        knock(address)
        assert not asked()


EXCEPTED: list[tuple[Mapping[str, str], str]] = [
    ({}, ""),
    ({"no_proxy": "a.example, b.example"}, "a.example,b.example,"),
    ({"no_grpc_proxy": "a.example", "no_proxy": "b.example"}, "a.example,"),
    ({"no_grpc_proxy": "", "no_proxy": "b.example"}, ""),
]


@listed(("variables", "hosts"), EXCEPTED)
def test_what_was_excepted_stays_so_for_grpc_and_for_all_others(variables: Mapping[str, str], hosts: str) -> None:
    made = with_exceptions(variables)
    assert made == {"no_grpc_proxy": f"{hosts}127.0.0.0/8,::1,localhost"}
    assert with_exceptions({**variables, **made}) == made
    assert direct("fl.example.org:9093") == []
