"""A server that names an address for the exchange: a client connects to those that its site allows, and its errors tell nothing more."""

from __future__ import annotations

import socket

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import InProcessGrid
from fl_bn.methods import METHODS, Phase
from tests.flower.own_apps import net
from tests.hostile.liars import RunConfig, SharedModel, header_for, source_model, to_numpy, to_records
from tests.hostile.own_app import own_app
from tests.listed import listed

HOST = "127.0.0.1"
CONFIG = {"clients": 2, "method": "fedtan", "dataset": "digits-plain", "model": "digits-cnn-small", "output": ""}
FAILED, NOT_ALLOWED = "own log", "exchange-addresses"  # words of the two sentences that a server may hear
APPS: dict[str, ClientApp | str] = {"application": "fl_bn.app.client:app", "own app": own_app("fedtan")}
KINDS = {"query.rendezvous": None, "train": Phase.EXCHANGE, "query.statistics": Phase.MEASURE}
PLACES = {  # the program, the site's line, and whether it allows this machine
    "nothing named in a simulation": ("pytest", None, True),
    "nothing named at a site": ("/usr/bin/flwr-clientapp", None, False),
    "this host": ("/usr/bin/flwr-clientapp", HOST, True),
    "another host": ("pytest", "superlink.example.org, 10.1.2.3:9095", False),
    "another port": ("pytest", f"{HOST}:1", False),
    "a host that begins alike": ("pytest", "127.0.0.10", False),
}


def site(app: str, allowed: str | None = None) -> InProcessGrid:
    grid = InProcessGrid(APPS[app], 2, CONFIG)
    grid._contexts[1].node_config.update({} if allowed is None else {"exchange-addresses": allowed})
    return grid


def error(grid: InProcessGrid, app: str, address: str, kind: str = "query.rendezvous") -> str:
    """Return a client's error after a message of this kind, whose exchange is at ``address``."""
    content, phase = RecordDict(), KINDS[kind]
    if phase is not None:
        shared = SharedModel(source_model(RunConfig.from_mapping(CONFIG)) if app == "application" else net(), METHODS["fedtan"]())
        sections = {section: to_numpy(tensors) for section, tensors in shared.sections().items()}
        content = to_records(sections, header_for(shared, 1, phase))
    told = {"exchange": "grpc", "exchange-address": address, "exchange-authority": b"", "exchange-token": "x"}
    told |= {"exchange-timeout": 3.0, "exchange-patience": 0.5, "learning-rate": 0.1, "measured": "inputs"}
    content["fl-bn/config"] = ConfigRecord(told)  # type: ignore[arg-type]
    (reply,) = grid.send_and_receive([Message(content, 1, kind, ttl=10.0, group_id="1")])
    return str(reply.error.reason)


@pytest.mark.sample("[nothing named at", "[another host", "[a host")
@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_client_connects_to_the_addresses_that_its_site_allows_and_tells_no_open_port_from_a_closed_one(
    place: str, app: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    program, line, allowed = PLACES[place]
    grid = site(app, line)
    error(grid, app, "x:1")  # loads the app
    monkeypatch.setattr("sys.argv", [program])
    with socket.create_server((HOST, 0)) as listens, socket.socket() as unused:  # who listens here speaks no gRPC
        listens.settimeout(0.3)
        unused.bind((HOST, 0))
        addresses = [f"{HOST}:{one.getsockname()[1]}" for one in (listens, unused)]
        for kind in KINDS:
            (said,) = {error(grid, app, address, kind) for address in addresses}
            assert (FAILED if allowed else NOT_ALLOWED) in said
            assert all(address in log.text for address in addresses)
            try:
                listens.accept()[0].close()
                connected = True
            except TimeoutError:
                connected = False
            assert connected == allowed


@listed("app", APPS)
@listed("address", ["unix:/run/a.sock", "unix:a:1", "ipv4:127.0.0.1:22,127.0.0.1:23", "dns://h/x:1", "a:1/", "", "x"])
def test_what_is_no_host_and_port_is_refused_by_its_form(app: str, address: str) -> None:
    assert error(site(app, "unix, dns, a"), app, address).startswith("WireError: config/exchange-address: ")
