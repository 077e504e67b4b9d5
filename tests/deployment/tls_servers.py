"""Free ports; a kit whose server certificate can be replaced, and a real TLS server that presents the certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fl_bn_site.certificates import alternative_name, read_certificate
from fl_bn_site.folders import EXCHANGE_PORTS
from fl_bn_site.kit import KitPlan, create


def listen() -> socket.socket:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.05)
    return listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports that are not in use, below the range from which the kernel chooses ports of outgoing connections.

    A federation opens the ports some time later. So tests that run at the same time search in different ranges.
    """
    ports: list[int] = []
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    start = 12000 + 5000 * worker + (os.getpid() * 37 + int(time.time() * 10)) % 3000
    for port in range(start, start + 2000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"expected {count} free ports from {start} to {start + 1999}, but found {len(ports)}")


def make_kit(folder: Path, fleet_port: int = 0, host: str = "localhost") -> Path:
    """Make a kit for two sites whose programs all listen on free ports of this machine; return its folder."""
    *exchange, fleet, control, serverappio, a, b = free_ports(EXCHANGE_PORTS + 5)
    create(KitPlan(host, ["A", "B"], fleet_port=fleet_port or fleet, exchange_port=exchange[0]), folder)
    for file, line, port in (
        ("server/server.toml", "control", control),
        ("server/server.toml", "serverappio", serverappio),
        ("sites/A/site.toml", "clientappio", a),
        ("sites/B/site.toml", "clientappio", b),
    ):
        write_line(folder / file, line, f"127.0.0.1:{port}")
    return folder


def write_line(file: Path, name: str, value: object) -> None:
    """Set the key ``name`` of a TOML file, which must have it, to another value."""
    shown = f'"{value}"' if isinstance(value, (str, Path)) else value
    lines = [f"{name} = {shown}" if line.partition(" =")[0] == name else line for line in file.read_text().splitlines()]
    assert f"{name} = {shown}" in lines
    file.write_text("\n".join(lines) + "\n")


def reissue(kit: Path, hosts: Sequence[str], begins: float = -1, ends: float = 100) -> None:
    """Replace the server's certificate in the kit by one for ``hosts``, valid from ``begins`` to ``ends`` in days from now."""
    authority = read_certificate(kit / "authority/ca.crt")
    key = load_pem_private_key((kit / "authority/ca.key").read_bytes(), None)
    server, now = read_certificate(kit / "server/server.crt"), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(server.subject)
        .issuer_name(authority.subject)
        .public_key(server.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=begins))
        .not_valid_after(now + timedelta(days=ends))
        .add_extension(x509.SubjectAlternativeName([alternative_name(host) for host in hosts]), critical=False)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    (kit / "server/server.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


@contextlib.contextmanager
def serving(listening: socket.socket, server: Path | None) -> Iterator[int]:
    """Accept connections on ``listening`` inside the block, make a TLS handshake, and close them; yield the port.

    ``server`` is the folder with the certificate and the key. None: the answer is plain text, without TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if server is not None:
        context.load_cert_chain(server / "server.crt", server / "server.key")
        context.set_alpn_protocols(["h2"])
    end = threading.Event()

    def answer() -> None:
        while not end.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:  # nobody came
                continue
            connection.settimeout(2)
            with contextlib.suppress(OSError), connection:
                if server is None:
                    connection.sendall(b"220 hello, I speak plain text\r\n")
                    connection.recv(1000)
                else:
                    with context.wrap_socket(connection, server_side=True) as tls:
                        tls.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield port_of(listening)
    finally:
        end.set()
        thread.join()


def accepts(site: Path, server: Path, host: str = "localhost") -> bool:
    """Whether Python's own TLS, which trusts the site's authority alone, accepts this server by this name."""
    context = ssl.create_default_context(cafile=str(site / "ca.crt"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with listen() as listening, serving(listening, server) as port, socket.create_connection(("127.0.0.1", port)) as raw:
        try:
            context.wrap_socket(raw, server_hostname=host).close()
        except ssl.SSLCertVerificationError:
            return False
    return True
