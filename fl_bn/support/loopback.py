"""Connections of this machine with itself. gRPC sends them, too, through the proxy that a variable names: it excepts no host by itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # gRPC reads the first that is set, empty or not, in lower case only
HERE = ("127.0.0.0/8", "::1", "localhost")  # as gRPC understands them


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine alone, so that nobody outside can listen."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def direct(address: str) -> list[tuple[str, int]]:
    """A gRPC channel's options, by which one to HOST:PORT of this machine goes through no proxy."""
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []


def excepted(variables: Mapping[str, str]) -> list[str]:
    """The hosts that gRPC reaches without a proxy, as the environment's ``variables`` say."""
    listed = next((variables[name] for name in EXCEPTIONS if name in variables), "")
    return [host.strip() for host in listed.split(",") if host.strip()]


def with_exceptions(variables: Mapping[str, str]) -> dict[str, str]:
    """The variable that excepts this machine, too, in programs that are not ours. Only gRPC reads it, so nothing changes for others."""
    return {EXCEPTIONS[0]: ",".join(dict.fromkeys([*excepted(variables), *HERE]))}
