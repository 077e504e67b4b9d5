"""Check whether the process of this container is alive, and can reach the servers that it needs.

    python healthcheck.py 127.0.0.1:9099 superlink:9092
    python healthcheck.py /run/site/apps.sock

The first address is that of the process's own gRPC health service (``--health-server-address``), or the path of a socket
that must accept a connection. Each further address must accept a TCP connection. The exit code is 0, or 1 with the reason
on standard output. The program imports neither Flower nor torch, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import os
import socket
import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE = 3.0  # seconds for each address; the compose file allows 10 s for all of them together


def serving(address: str) -> str:
    """Return what is wrong with the health service at ``address``, HOST:PORT or a path; empty: it serves."""
    if address.startswith("/"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            code = probe.connect_ex(address)
        return f"nobody answers at {address}: {os.strerror(code)}" if code else ""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return f"the health service at {address} does not answer: {error.code().name} {error.details()}"
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return f"the health service at {address} says {HealthCheckResponse.ServingStatus.Name(answer.status)}, not SERVING"


def reachable(address: str) -> str:
    """Return why ``address``, HOST:PORT, does not accept a TCP connection; empty: it accepts one."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=DEADLINE):
            return ""
    except OSError as error:
        return f"{address} cannot be reached: {error}"


def main(addresses: list[str]) -> int:
    if not addresses:
        print("healthcheck.py needs at least the address of a health service, e.g. 127.0.0.1:9099", file=sys.stderr)
        return 1
    faults = [fault for fault in (serving(addresses[0]), *map(reachable, addresses[1:])) if fault]
    print(*faults or ["ok"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
