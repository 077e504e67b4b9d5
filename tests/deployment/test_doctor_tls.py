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


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return tls_servers.make_kit(tmp_path / "kit", 9092)


def shaken(kit: Path, authority: Path | None = None, server: Path | None = None, host: str = "localhost") -> tls.Finding:
    """What the handshake with the kit's server finds."""
    with tls_servers.listen() as listening, tls_servers.serving(listening, server or kit / "server") as port:
        return tls.handshake(host, port, authority or kit / "sites" / "A" / "ca.crt")


@pytest.mark.parametrize(
    ("hosts", "begins", "ends", "status", "words"),
    [
        (["localhost"], -9, 40, "ok", "has a certificate for localhost, signed by ca.crt"),
        (["localhost"], -9, 20, "warn", "has a certificate for localhost, signed by ca.crt"),
        (["localhost"], -9, -1, "fail", "expired on"),
        (["localhost"], 2, 9, "fail", "is not valid before"),
        (["elsewhere.example.org"], -9, 40, "fail", "is not for localhost, but for elsewhere.example.org"),
        (["elsewhere.example.org"], -9, -1, "fail", "UTC) and is not for localhost"),
    ],
)
def test_dates_and_names_are_told_apart(kit: Path, hosts: list[str], begins: float, ends: float, status: str, words: str) -> None:
    tls_servers.reissue(kit, hosts, begins, ends)
    found = shaken(kit)
    assert (found.status, words in found.text) == (status, True), str(found)


def test_a_stranger_with_a_certificate_of_the_right_name(kit: Path, tmp_path: Path) -> None:
    other = tls_servers.make_kit(tmp_path / "other", 9092)
    found = shaken(kit, server=other / "server")
    assert found.status == "fail"
    assert "is not signed by" in found.text
    assert shaken(kit, authority=other / "server" / "ca.crt", server=other / "server").status == "ok"


def test_what_does_not_speak_tls_and_what_is_no_certificate(kit: Path, tmp_path: Path) -> None:
    with tls_servers.listen() as listening, tls_servers.serving(listening, None) as port:
        found = tls.handshake("localhost", port, kit / "server" / "ca.crt")
    assert (found.status, "accepts connections, but does not speak TLS" in found.text) == ("fail", True), str(found)
    (tmp_path / "ca.crt").write_text("no certificate")
    for authority in (tmp_path / "ca.crt", tmp_path / "gone.crt"):
        assert "cannot be read" in shaken(kit, authority=authority).text


def test_expiry_of_files(kit: Path, tmp_path: Path) -> None:
    files = [kit / "server" / "ca.crt", kit / "server" / "server.crt"]
    assert (expiry(files).status, expiry(files[:1]).status) == ("ok", "ok")
    for days, status in ((40, "ok"), (20, "warn"), (-1, "fail")):
        tls_servers.reissue(kit, ["localhost"], -9, days)
        found = expiry(files)
        assert (found.status, "server.crt" in found.text) == (status, True)
    assert expiry(files, lambda: tls.now() + timedelta(days=9000)).status == "fail"
    assert expiry([tmp_path / "gone.crt"]).status == "fail"


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
    ("ahead", "status", "words"),
    [
        (0.0, "ok", "Flower accepts 5 s ahead"),
        (100.0, "ok", "s behind the server's"),
        (200.0, "warn", "s behind the server's"),
        (400.0, "fail", "s behind the server's"),
        (-3.5, "warn", "s ahead of the server's"),
        (-7.0, "fail", "s ahead of the server's"),
        (86400.0 * 3, "fail", "refused all time stamps"),
    ],
)
def test_a_clock_that_flower_would_refuse_is_found(kit: Path, server: Server, ahead: float, status: str, words: str) -> None:
    server.ahead, authority = ahead, kit / "server" / "ca.crt"
    found = tls.clock(authority, lambda: tls.server_skew("localhost", server.port, authority))
    assert (found.status, words in found.text) == (status, True), str(found)


def test_a_clock_without_a_server_is_held_against_the_authority(kit: Path) -> None:
    authority = kit / "server" / "ca.crt"
    assert "the server cannot be reached" in tls.clock(authority, None).text
    assert tls.clock(authority, None, lambda: tls.now() - timedelta(days=2)).status == "fail"

    def silent() -> float:
        raise LookupError("UNAVAILABLE")

    found = tls.clock(authority, silent)
    assert (found.status, "the server did not answer as expected: UNAVAILABLE" in found.text) == ("ok", True)


def test_what_is_said_of_flower_is_flowers() -> None:
    assert tls.HEADERS == (PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER)
    assert (-flower.MIN_TIMESTAMP_DIFF, flower.MAX_TIMESTAMP_DIFF) == (tls.AHEAD, tls.BEHIND)
    assert (SYSTEM_TIME_TOLERANCE, SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE) == (tls.AHEAD, tls.BEHIND)
