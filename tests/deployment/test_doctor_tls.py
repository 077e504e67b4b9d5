"""Real handshakes with certificates that are wrong in some way, and the server's clock, told by Flower's own check of time stamps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as flower

from fl_bn_site.checks import tls
from fl_bn_site.checks.credentials import expiry
from tests.deployment import tls_servers
from tests.listed import listed


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return tls_servers.make_kit(tmp_path / "kit", 9092)


def shaken(kit: Path, authority: Path | None = None, server: Path | None = None, host: str = "localhost") -> tls.Finding:
    """What the handshake with the kit's server finds."""
    with tls_servers.listen() as listening, tls_servers.serving(listening, server or kit / "server") as port:
        return tls.handshake(host, port, authority or kit / "sites" / "A" / "ca.crt")


@listed(
    ("hosts", "begins", "ends", "status", "words"),
    [
        (["localhost"], -9, 40, "ok", "localhost"),
        (["localhost"], -9, 20, "warn", "localhost"),
        (["localhost"], -9, -1, "fail", "expired on"),
        (["localhost"], 2, 9, "fail", "is not valid before"),
        (["elsewhere.example.org"], -9, 40, "fail", "elsewhere.example.org"),
        (["elsewhere.example.org"], -9, -1, "fail", "is not for localhost"),
    ],
)
def test_dates_and_names_are_told_apart(tmp_path: Path, hosts: list[str], begins: float, ends: float, status: str, words: str) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", 9092)
    tls_servers.reissue(kit, hosts, begins, ends)
    found = shaken(kit)
    assert (found.status, words in found.text) == (status, True), str(found)
    files = [kit / "server/ca.crt", kit / "server/server.crt"]
    assert expiry(files).status == {40: "ok", 9: "warn", 20: "warn", -1: "fail"}[int(ends)]


def test_a_stranger_with_a_certificate_of_the_right_name(kit: Path, tmp_path: Path) -> None:
    other = tls_servers.make_kit(tmp_path / "other", 9092)
    assert shaken(kit, server=other / "server").status == "fail"
    assert shaken(kit, authority=other / "server" / "ca.crt", server=other / "server").status == "ok"


def test_what_does_not_speak_tls_and_what_is_no_certificate(kit: Path, tmp_path: Path) -> None:
    with tls_servers.listen() as listening, tls_servers.serving(listening, None) as port:
        assert tls.handshake("localhost", port, kit / "server" / "ca.crt").status == "fail"
    (tmp_path / "ca.crt").write_text("no certificate")
    for authority in (tmp_path / "ca.crt", tmp_path / "gone.crt"):
        assert "cannot be read" in shaken(kit, authority=authority).text


class Server:
    """Flower's own check of time stamps, behind TLS, with a clock that can be set ``ahead`` (seconds)."""

    def __init__(self, kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        monkeypatch.setattr(flower, "now", lambda: datetime.now(UTC) + timedelta(seconds=self.ahead))
        self._server = grpc.server(ThreadPoolExecutor(4), interceptors=[flower.NodeAuthServerInterceptor(cast(Any, None))])
        add_FleetServicer_to_server(FleetServicer(), self._server)
        pair = ((kit / "server" / "server.key").read_bytes(), (kit / "server" / "server.crt").read_bytes())
        self.port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def server(kit: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(kit, monkeypatch)
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("ahead", "status"),
    [(0.0, "ok"), (100.0, "ok"), (200.0, "warn"), (400.0, "fail"), (-3.5, "warn"), (-7.0, "fail"), (86400.0 * 3, "fail")],
)
def test_a_clock_that_flower_would_refuse_is_found(kit: Path, server: Server, ahead: float, status: str) -> None:
    server.ahead, authority = ahead, kit / "server" / "ca.crt"
    if ahead < 1000:
        assert tls.server_skew("localhost", server.port, authority) == pytest.approx(ahead, abs=2 * tls.CLOSE)
    found = tls.clock(authority, lambda: tls.server_skew("localhost", server.port, authority))
    assert found.status == status, str(found)


def test_a_clock_without_a_server_is_held_against_the_authority(kit: Path) -> None:
    authority = kit / "server" / "ca.crt"

    def silent() -> float:
        raise LookupError("UNAVAILABLE")

    assert tls.clock(authority, None).status == tls.clock(authority, silent).status == "ok"
    assert tls.clock(authority, None, lambda: tls.now() - timedelta(days=2)).status == "fail"


def test_what_is_said_of_flower_is_flowers() -> None:
    assert tls.HEADERS == (PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
    assert (-flower.MIN_TIMESTAMP_DIFF, flower.MAX_TIMESTAMP_DIFF) == (tls.AHEAD, tls.BEHIND)
    assert (SYSTEM_TIME_TOLERANCE, SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE) == (tls.AHEAD, tls.BEHIND)
