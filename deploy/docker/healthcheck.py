"""Is this container's process alive, and can it reach the one that it works for?

    python healthcheck.py 127.0.0.1:9099 superlink:9092

The first address is that of the process's own gRPC health service (``--health-server-address``); each further one must accept a TCP
connection. Exits 0, or 1 with the reason. It starts in a fraction of a second: neither Flower nor torch is imported.
"""

from __future__ import annotations

import socket
import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

DEADLINE = 3.0  # seconds, for each address; the compose file gives all of them together 10


def serving(address: str) -> str:
    """What is wrong with the health service at ``address``; empty: nothing."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=DEADLINE)
        except grpc.RpcError as error:
            return f"the health service at {address} does not answer: {error.code().name} {error.details()}"
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return f"the health service at {address} says {HealthCheckResponse.ServingStatus.Name(answer.status)}, not SERVING"


def reachable(address: str) -> str:
    """Why ``address`` accepts no TCP connection; empty: it does."""
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
