"""Check host names, ports and addresses, by which the machines of a deployment reach each other."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from fl_bn.support.finding import Finding
from fl_bn.support.loopback import EXCEPTIONS, excepted, is_loopback
from fl_bn_site.folders import ServerFolder, host_port

TIMEOUT = 5.0  # seconds
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # the variables that gRPC reads, in its order; it ignores names in upper case


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
            if error.errno == errno.EADDRINUSE and running:
                return Finding("ok", check, f"{address} ({line}) is in use while `fl-bn start` of this folder runs")
            if error.errno == errno.EADDRINUSE:
                taken = f"{address} ({line}) is taken by {holder(port) or 'another program'}"
                return Finding("fail", check, taken, f"end that program, or change the port at {line}")
            if error.errno == errno.EADDRNOTAVAIL:
                none = f"{host} is not an address of this machine, so no program can listen on {address} ({line})"
                return Finding("fail", check, none, f"write 127.0.0.1, 0.0.0.0 or an address of this machine at {line}")
            return Finding("fail", check, f"{address} ({line}): {error.strerror}", f"write another address at {line} (ports from 1024 on)")
    return Finding("ok", check, f"{address} ({line}) is free")


def ports_free(check: str, first: int, last: int, lines: str, *, running: bool) -> Finding:
    """Check whether this machine can listen on the ports of the layer-wise exchange. Each active run needs one of them.

    Args:
        check: The name of the check.
        first: The first port.
        last: The last port.
        lines: The lines that have the range, and their TOML file, as for ``port_free``. The finding names them.
        running: Whether ``fl-bn start`` of this folder runs, so that its runs may use some of the ports.
    """
    findings = [port_free(check, f"0.0.0.0:{port}", lines, running=running) for port in range(first, last + 1)]
    wrong = [finding for finding in findings if finding.status != "ok"]
    if not wrong:
        used = sum("in use" in finding.text for finding in findings)
        shown = f"{first} to {last}" if last > first else f"{first}"
        what = f"{used} of them in use while `fl-bn start` of this folder runs" if used else "free"
        return Finding("ok", check, f"ports {shown} ({lines}), one for each active run: {what}")
    texts = "; ".join(finding.text for finding in wrong)
    if len(wrong) == len(findings):
        return Finding("fail", check, f"a run needs a port for the layer-wise exchange, and none is free: {texts}", wrong[0].do)
    most = f"only {len(findings) - len(wrong)} of {len(findings)} ports can be used, which limits the runs at a time: {texts}"
    return Finding("warn", check, most, wrong[0].do)


def holder(port: int, proc: Path = Path("/proc")) -> str:
    """Find the process that listens on a TCP port of this machine.

    Args:
        port: The port.
        proc: The folder in which Linux describes its processes.

    Returns:
        The id and the name of the process, such as ``process 123 (python)``; empty where this user sees no such process.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(handle) in sockets for handle in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # the process belongs to another user, or has ended
            continue
    return ""


def _listening(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: LISTEN
                yield fields[9]


def resolves(host: str, port: int) -> Finding:
    """Check whether the name ``host`` can be resolved to an address."""
    try:
        addresses = sorted({str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except socket.gaierror as error:
        return Finding(
            "fail",
            "superlink name",
            f"the name {host} cannot be resolved to an address: {error.strerror}",
            "correct the name, or have it added to DNS (or to /etc/hosts on every machine)",
        )
    return Finding("ok", "superlink name", host if addresses == [host] else f"{host} is {', '.join(addresses)}")


def leads_here(host: str, port: int) -> Finding:
    """Check, on the server's machine, whether the name ``host`` is resolved to an address of this machine."""
    finding = resolves(host, port)
    if finding.status == "ok" and not any(_own(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        return Finding(
            "warn",
            finding.check,
            f"{finding.text}, which is not an address of this machine",
            "fine behind a router that forwards the ports; else correct `superlink` in server.toml and the sites' site.toml",
        )
    return finding


def _own(address: object) -> bool:
    family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address).partition("%")[0], 0))
        except OSError:
            return False
    return True


def reachable(host: str, port: int) -> Finding:
    """Check whether a program accepts TCP connections at ``port`` of ``host``.

    ``tls.handshake`` checks whether that program is the SuperLink.
    """
    check = "superlink port"
    try:
        with socket.create_connection((host, port), TIMEOUT):
            return Finding("ok", check, f"{host}:{port} accepts connections")
    except ConnectionRefusedError:
        return Finding(
            "warn",
            check,
            f"{host}:{port} refuses connections: that machine answers, but no program listens on the port",
            "start the server (`fl-bn start` there) and run `fl-bn doctor` again; if the server runs, a firewall may be in between",
        )
    except OSError as error:
        what = f"no answer within {TIMEOUT:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Finding(
            "fail",
            check,
            f"{host}:{port} cannot be reached: {what}",
            f"check that the server is on, and that firewalls on both sides let TCP port {port} through",
        )


def proxy(host: str) -> Finding:
    """Check whether gRPC would connect to ``host`` through a proxy that the environment names.

    The other checks use Python's sockets, which never use a proxy. So those checks would not notice a proxy.
    """
    parts = [part.lstrip(".") for part in excepted(os.environ)]
    named = [name for name in PROXIES if os.environ.get(name)]
    if named and not is_loopback(host) and not any(part and (host == part or host.endswith(f".{part}")) for part in parts):
        read = next((name for name in EXCEPTIONS if name in os.environ), EXCEPTIONS[-1])
        return Finding(
            "warn",
            "proxy",
            f"{named[0]} is set, so gRPC connects to {host} through {os.environ[named[0]].rpartition('@')[2]}",
            f"if that proxy does not pass gRPC on: export {read}={','.join([*excepted(os.environ), host])}",
        )
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
