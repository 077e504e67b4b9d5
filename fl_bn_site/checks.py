"""Check addresses, ports and the TLS connection of a deployment. ``verify.py`` checks the files of its folders."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from fl_bn.support.finding import Finding, Status
from fl_bn.support.loopback import EXCEPTIONS, excepted, is_loopback
from fl_bn_site.folders import ServerFolder, host_port

TIMEOUT = 5.0  # seconds
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # the variables that gRPC reads, in its order; it ignores names in upper case
DATES, NAMES = (9, 10), (62, 64)  # values of OpenSSL's constants X509_V_ERR_...: not yet valid, expired; wrong host, wrong address


def port_free(check: str, address: str, line: str, *, running: bool) -> Finding:
    """Check whether this machine can listen on an address.

    Args:
        check: The name of the check.
        address: HOST:PORT.
        line: The line that has the address, and its TOML file, such as ``clientappio in site.toml``. The finding names it.
        running: Whether ``fl-bn start`` of this folder runs, so that its programs may use the port themselves.
    """
    host, port = host_port(address)
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # do not fail for connections that have just ended
        try:
            probe.bind(place)
        except OSError as error:
            if running:
                return Finding("ok", check, f"{address} ({line}) is in use while `fl-bn start` of this folder runs")
            what = f"no program can listen on {address} ({line}): {error.strerror}"
            return Finding("fail", check, what, f"end the program that listens there (`ss -ltnp` shows it), or change {line}")
    return Finding("ok", check, f"{address} ({line}) is free")


def resolves(host: str) -> Finding:
    """Check whether the name ``host`` has an address."""
    try:
        addresses = sorted({str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except socket.gaierror as error:
        what = f"the name {host} cannot be resolved to an address: {error.strerror}"
        return Finding("fail", "superlink name", what, "correct the name, or have it added to DNS (or to /etc/hosts on every machine)")
    return Finding("ok", "superlink name", host if addresses == [host] else f"{host} is {', '.join(addresses)}")


def connection(host: str, port: int, authority: Path) -> Iterator[Finding]:
    """Check the way to a SuperLink: name, port and TLS, until one of them fails.

    Args:
        host: The name or address of the server. Its certificate must be valid for it.
        port: Its port for SuperNodes.
        authority: The certificate file of the kit's authority, which alone is trusted.
    """
    named = resolves(host)
    yield named
    if named.status != "ok":
        return
    place = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), TIMEOUT):
            yield Finding("ok", "superlink port", f"{place} accepts connections")
    except OSError as error:
        status: Status = "warn" if isinstance(error, ConnectionRefusedError) else "fail"
        what = f"{place} cannot be reached: {error.strerror or error}"
        yield Finding(status, "superlink port", what, "start the server (`fl-bn start` there), and let the port through all firewalls")
        return
    yield handshake(host, port, authority)


def handshake(host: str, port: int, authority: Path) -> Finding:
    """Check the server's certificate by a TLS handshake that trusts one authority only. The arguments are those of ``connection``."""
    check, place = "superlink TLS", f"{host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # create_default_context would also trust the authorities of this machine
    try:
        context.load_verify_locations(authority)
        context.set_alpn_protocols(["h2"])  # the protocol of gRPC
        with socket.create_connection((host, port), TIMEOUT) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
            ends = (tls.getpeercert() or {}).get("notAfter")
    except ssl.SSLCertVerificationError as error:
        text = f"the certificate of {place} is refused: {error.verify_message}"
        if error.verify_code in DATES:
            return Finding("fail", check, text, "set this clock if it is wrong, else renew on the server (`fl-bn kit renew`)")
        if error.verify_code in NAMES:
            return Finding("fail", check, text, f"correct superlink in site.toml, or make a kit with --also {host}")
        return Finding("fail", check, text, f"site and server have folders of different kits: compare {authority} with the server's ca.crt")
    except OSError as error:  # ssl.SSLError is one
        what = f"{place} does not speak TLS, or {authority} cannot be read: {error}"
        return Finding("fail", check, what, "correct superlink or root-certificates in site.toml")
    return Finding("ok", check, f"{place} has a certificate for {host}, signed by {authority.name}, until {ends}")


def proxy(host: str) -> Finding:
    """Check whether gRPC would connect to ``host`` through a proxy that the environment names.

    The other checks use Python's sockets, which never use a proxy. So those checks would not notice a proxy.
    """
    parts = [part.lstrip(".") for part in excepted(os.environ)]
    named = [name for name in PROXIES if os.environ.get(name)]
    if named and not is_loopback(host) and not any(part and (host == part or host.endswith(f".{part}")) for part in parts):
        read = next((name for name in EXCEPTIONS if name in os.environ), EXCEPTIONS[-1])
        what = f"{named[0]} is set, so gRPC connects to {host} through {os.environ[named[0]].rpartition('@')[2]}"
        names = ",".join([*excepted(os.environ), host])
        return Finding("warn", "proxy", what, f"if that proxy does not pass gRPC on: export {read}={names}")
    return Finding("ok", "proxy", f"none between here and {host}" if not named else f"{host} is excepted from {named[0]}")


def exposure(server: ServerFolder) -> Finding:
    """Check on which addresses the server listens.

    Sites must reach the address ``fleet``. Only this machine should reach the addresses ``control`` and ``serverappio``.
    """
    fleet, control, serverappio = (host_port(address)[0] for address in (server.fleet, server.control, server.serverappio))
    if is_loopback(fleet) and not is_loopback(server.superlink):
        what = f"fleet = {server.fleet} can be reached from this machine only, so no site can connect"
        return Finding("fail", "exposure", what, f"write 0.0.0.0:{host_port(server.fleet)[1]} at fleet in server.toml")
    for line, host, risk in (("control", control, "start runs and register sites"), ("serverappio", serverappio, "read its plaintext")):
        if not is_loopback(host):
            what = f"{line} listens on {host}: whoever can reach it can {risk}"
            return Finding("warn", "exposure", what, f"write 127.0.0.1 at {line} in server.toml, or protect the port by a firewall")
    return Finding("ok", "exposure", f"sites can reach fleet ({server.fleet}); only this machine can reach control and serverappio")
