"""Connect to programs on the same machine without a proxy, which gRPC uses even there."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # gRPC reads the first that is set, empty or not, in lower case only
HERE = ("127.0.0.0/8", "::1", "localhost")  # as gRPC understands them


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def direct(address: str) -> list[tuple[str, int]]:
    """Return options of a gRPC channel to HOST:PORT, without a proxy on this machine."""
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []


def excepted(variables: Mapping[str, str]) -> list[str]:
    """Return the hosts that gRPC reaches without a proxy by these environment variables."""
    listed = next((variables[name] for name in EXCEPTIONS if name in variables), "")
    return [host.strip() for host in listed.split(",") if host.strip()]


def with_exceptions(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``no_grpc_proxy`` and its value, for the environment of another program.

    So gRPC in that program reaches this machine, and all hosts that ``variables``
    exempt, without the proxy. Other software does not read this variable.
    """
    return {EXCEPTIONS[0]: ",".join(dict.fromkeys([*excepted(variables), *HERE]))}
