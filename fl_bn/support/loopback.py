"""Connections of this machine with itself.

By default, gRPC sends even these through the proxy that an environment variable names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

EXCEPTIONS = ("no_grpc_proxy", "no_proxy")  # gRPC reads the first that is set, empty or not, in lower case only
HERE = ("127.0.0.0/8", "::1", "localhost")  # as gRPC understands them


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address, so that no traffic leaves this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def direct(address: str) -> list[tuple[str, int]]:
    """Return the options of a gRPC channel to HOST:PORT, by which a channel to this machine uses no proxy."""
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []


def excepted(variables: Mapping[str, str]) -> list[str]:
    """Return the hosts that gRPC reaches without a proxy, from the environment's ``variables``."""
    listed = next((variables[name] for name in EXCEPTIONS if name in variables), "")
    return [host.strip() for host in listed.split(",") if host.strip()]


def with_exceptions(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable by which gRPC in other programs reaches this machine without a proxy.

    It keeps the exceptions in ``variables``. Only gRPC reads it, so nothing changes for other software.
    """
    return {EXCEPTIONS[0]: ",".join(dict.fromkeys([*excepted(variables), *HERE]))}
