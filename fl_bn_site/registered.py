"""What a SuperLink knows, asked through its Control API: whose key each node has, who is here, and its runs.

Flower's own command ``flwr`` shows neither keys nor when a site was last seen. And after a connection that failed it may never end, where
gRPC's thread had the lock of a channel that nobody closed.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import grpc

from fl_bn.support.loopback import direct
from fl_bn_site.commands import COMPAT


@dataclass(frozen=True)
class Node:
    """A registered SuperNode. ``key``: its public key (PEM); ``seen``: when it was last here, None: never."""

    id: int
    key: bytes
    online: bool
    seen: datetime | None


@dataclass(frozen=True)
class Submitted:
    """A run. ``status``: pending, starting, running, finished:completed, ...; ``config``: what was given with it; times are None where
    they have not come; ``nbytes``: from and to the sites so far."""

    id: int
    status: str
    config: Mapping[str, Any]
    submitted: datetime | None
    ended: datetime | None
    started: datetime | None = None
    nbytes: tuple[int, int] = (0, 0)


def registered_nodes(address: str, authority: bytes, timeout: float = 30.0) -> list[Node]:
    """The nodes that are registered at the SuperLink whose Control API is at ``address``.

    Flower binds node id and key: a SuperNode proves with every request that it has the private key of the node id it acts for.

    Raises:
        ConnectionError: no SuperLink answers that ``authority`` (PEM) vouches for, or it cannot say.
    """
    answer = _asked(address, authority, "ListNodes", "ListNodesRequest", timeout)
    nodes = []
    for node in answer.nodes_info:
        if node.status != "unregistered":
            seen = [_time(at) for at in (node.last_activated_at, node.last_deactivated_at)]
            if node.online_until:
                seen.append(datetime.fromtimestamp(node.online_until - 2 * node.heartbeat_interval).astimezone())
            nodes.append(Node(node.node_id, node.public_key, node.status == "online", max(filter(None, seen), default=None)))
    return nodes


def submitted_runs(address: str, authority: bytes, timeout: float = 30.0) -> list[Submitted]:
    """The runs of that SuperLink, the newest first. Raises as ``registered_nodes``."""
    answer = _asked(address, authority, "ListRuns", "ListRunsRequest", timeout)
    runs = [
        Submitted(
            run.run_id,
            ":".join(filter(None, (run.status.status, run.status.sub_status))),
            {key: getattr(value, value.WhichOneof("scalar")) for key, value in run.override_config.items()},
            _time(run.pending_at),
            _time(run.finished_at),
            _time(run.running_at),
            (run.bytes_recv, run.bytes_sent),
        )
        for run in answer.run_dict.values()
    ]
    return sorted(runs, key=lambda run: run.submitted or datetime.min.astimezone(), reverse=True)


def run_log(address: str, authority: bytes, run: int, after: float, timeout: float = 60.0) -> Iterator[tuple[str, float]]:
    """What the run's ServerApp printed after the time ``after`` (seconds; 0: all), as it comes, piece by piece with its time.

    Ends with the run, or after ``timeout`` seconds. Raises ConnectionError where the connection breaks, or there is none.
    """
    find = runpy.run_path(str(COMPAT))["find"]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), direct(address)) as channel:
        request = find("StreamLogsRequest")(run_id=run, after_timestamp=after)
        try:
            for piece in find("ControlStub")(channel).StreamLogs(request, timeout=timeout):
                yield piece.log_output, piece.latest_timestamp
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectionError(f"the SuperLink at {address} does not answer: {error.details()}") from error


def _asked(address: str, authority: bytes, what: str, request: str, timeout: float) -> Any:
    find = runpy.run_path(str(COMPAT))["find"]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), direct(address)) as channel:
        try:
            return getattr(find("ControlStub")(channel), what)(find(request)(), timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionError(f"the SuperLink at {address} does not answer: {error.details()}") from error


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
