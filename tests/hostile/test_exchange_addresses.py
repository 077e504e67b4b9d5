"""A server that names an address for the exchange: a client connects to those that its site allows, and its errors tell nothing more."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import InProcessGrid
from fl_bn.methods import METHODS, Phase
from tests.hostile.liars import RunConfig, SharedModel, header_for, source_model, to_numpy, to_records
from tests.hostile.own_app import net, own_app
from tests.listed import listed

HOST = "127.0.0.1"
CONFIG = {"clients": 2, "method": "fedtan", "dataset": "digits-plain", "model": "digits-cnn-small", "output": ""}
FAILED, NOT_ALLOWED = "own log", "exchange-addresses"  # words of the two sentences that a server may hear
APPS: dict[str, ClientApp | str] = {"application": "fl_bn.apps.client:app", "own app": own_app("fedtan")}
apps = pytest.mark.parametrize("app", APPS)


class Site(InProcessGrid):
    """One client, and the messages of a server that lies about the exchange. ``node``: lines of the site's node config."""

    def __init__(self, app: str, **node: str) -> None:
        super().__init__(APPS[app], 2, CONFIG)
        self._contexts[1].node_config.update({name.replace("_", "-"): value for name, value in node.items()})

    def asked(self, address: str, kind: str = "query.rendezvous", content: RecordDict | None = None, token: str = "x") -> Message:
        """The client's answer to a message whose exchange is at ``address``."""
        content = RecordDict() if content is None else content
        config = dict(content.config_records.get("fl-bn/config", {}))
        config |= {"exchange": "grpc", "exchange-address": address, "exchange-authority": b"", "exchange-token": token}
        content["fl-bn/config"] = ConfigRecord({**config, "exchange-timeout": 3.0, "exchange-patience": 2.0})
        (identity,) = self.push_messages([Message(content, 1, kind, ttl=10.0, group_id="1")])
        (reply,) = self.pull_messages([identity])
        return reply

    def error(self, address: str, *more: Any) -> str:
        reply = self.asked(address, *more)
        assert reply.has_error()
        return str(reply.error.reason)


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """A port that somebody listens on who speaks no gRPC."""
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(0.3)
        yield server, f"{HOST}:{server.getsockname()[1]}"


@contextmanager
def closed() -> Iterator[str]:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        yield f"{HOST}:{unused.getsockname()[1]}"


def connected(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True


@pytest.mark.slow
@apps
def test_errors_do_not_tell_an_open_port_from_a_closed_one(app: str, log: pytest.LogCaptureFixture) -> None:
    """Of a host that is allowed: in a simulation this machine is."""
    with listening() as (server, speechless), closed() as nobody:
        errors = {Site(app).error(address) for address in (speechless, nobody)}
        assert connected(server)  # control
        (only,) = errors
        assert FAILED in only
        assert nobody in log.text
        assert speechless in log.text


PLACES = {
    "nothing named": ({}, True),
    "nothing allowed": ({"exchange_addresses": ""}, False),
    "another host": ({"exchange_addresses": "superlink.example.org, 10.1.2.3:9095"}, False),
    "another port": ({"exchange_addresses": f"{HOST}:1"}, False),
    "a host that begins alike": ({"exchange_addresses": "127.0.0.10"}, False),
}


@pytest.mark.sample(3)
@apps
@pytest.mark.parametrize("place", PLACES)
def test_a_client_connects_to_no_address_that_its_site_does_not_allow(
    place: str, app: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    node, deployed = PLACES[place]
    site = Site(app, **node)
    assert site.error(f"{HOST}:1").startswith("ExchangeFailed: ")  # loads the app
    monkeypatch.setattr("sys.argv", ["/usr/bin/flwr-clientapp" if deployed else "pytest"])
    with listening() as (server, speechless), closed() as nobody:
        errors = {site.error(address) for address in (speechless, nobody, "no-such-host.invalid:22")}
        assert not connected(server)
    (only,) = errors
    assert NOT_ALLOWED in only
    assert speechless in log.text


@listed("app", APPS)
@listed("address", ["unix:/run/a.sock", "unix:a:1", "ipv4:127.0.0.1:22,127.0.0.1:23", "dns://h/x:1", "a:1/", "", "x"])
def test_what_is_no_host_and_port_is_refused_by_its_form(app: str, address: str) -> None:
    assert Site(app, exchange_addresses="unix, dns, a").error(address).startswith("WireError: config/exchange-address: ")


@pytest.mark.slow
@apps
@pytest.mark.parametrize(("kind", "phase"), [("train", Phase.EXCHANGE), ("query.statistics", Phase.MEASURE)])
def test_the_exchange_of_a_round_and_of_statistics_is_where_the_site_allows_it(kind: str, phase: Phase, app: str) -> None:
    model = source_model(RunConfig.from_mapping(CONFIG)) if app == "application" else net()
    shared = SharedModel(model, METHODS["fedtan"]())

    def content() -> RecordDict:
        made = to_records({section: to_numpy(tensors) for section, tensors in shared.sections().items()}, header_for(shared, 1, phase))
        made["fl-bn/config"] = ConfigRecord({"learning-rate": 0.1, "measured": "inputs"})
        return made

    with listening() as (server, speechless):
        assert NOT_ALLOWED in Site(app, exchange_addresses="superlink").error(speechless, kind, content())
        assert not connected(server)
        allowed = Site(app, exchange_addresses=HOST).error(speechless, kind, content())  # control
        assert connected(server)
        assert FAILED in allowed
