"""Ask a SuperLink's Control API for its nodes, with their keys, and for its runs.

Flower's own command ``flwr`` shows neither keys nor when a site was last seen. After a failed connection
``flwr`` may also hang for ever, because a thread of gRPC holds the lock of a channel that nobody closed.
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
    """Describe a registered SuperNode.

    Attributes:
        id: Flower's id of the node.
        key: Its public key (PEM).
        online: Whether it is connected now.
        seen: When it was connected last; None: never.
    """

    id: int
    key: bytes
    online: bool
    seen: datetime | None


@dataclass(frozen=True)
class Submitted:
    """Describe a run that was submitted to the SuperLink.

    Attributes:
        id: Flower's id of the run.
        status: pending, starting, running, finished:completed, ...
        config: The run config that was submitted with it.
        submitted: When it was submitted.
        ended: When it ended; None: it has not.
        started: When it began to run; None: it has not.
        nbytes: Bytes from the sites and to the sites so far.
        code: The SHA-256 of the app that is sent to the sites.
    """

    id: int
    status: str
    config: Mapping[str, Any]
    submitted: datetime | None
    ended: datetime | None
    started: datetime | None = None
    nbytes: tuple[int, int] = (0, 0)
    code: str = ""


def registered_nodes(address: str, authority: bytes, timeout: float = 30.0) -> list[Node]:
    """Return the nodes that are registered at a SuperLink.

    Flower binds node id and key: with every request a SuperNode proves that it has the private key of the node
    id it acts for.

    Args:
        address: Of the Control API, HOST:PORT.
        authority: The certificate (PEM) that vouches for the SuperLink.
        timeout: Seconds.

    Raises:
        ConnectionError: No SuperLink for which ``authority`` vouches answers.
    """
    answer = _ask(address, authority, "ListNodes", "ListNodesRequest", timeout)
    nodes = []
    for node in answer.nodes_info:
        if node.status != "unregistered":
            seen = [_time(at) for at in (node.last_activated_at, node.last_deactivated_at)]
            if node.online_until:
                seen.append(datetime.fromtimestamp(node.online_until - 2 * node.heartbeat_interval).astimezone())
            nodes.append(Node(node.node_id, node.public_key, node.status == "online", max(filter(None, seen), default=None)))
    return nodes


def submitted_runs(address: str, authority: bytes, timeout: float = 30.0) -> list[Submitted]:
    """Return the runs of a SuperLink, the newest first.

    Args:
        address: Of the Control API, HOST:PORT.
        authority: The certificate (PEM) that vouches for the SuperLink.
        timeout: Seconds.

    Raises:
        ConnectionError: No SuperLink for which ``authority`` vouches answers.
    """
    answer = _ask(address, authority, "ListRuns", "ListRunsRequest", timeout)
    runs = [
        Submitted(
            run.run_id,
            ":".join(filter(None, (run.status.status, run.status.sub_status))),
            {key: getattr(value, value.WhichOneof("scalar")) for key, value in run.override_config.items()},
            _time(run.pending_at),
            _time(run.finished_at),
            _time(run.running_at),
            (run.bytes_recv, run.bytes_sent),
            run.fab_hash,
        )
        for run in answer.run_dict.values()
    ]
    return sorted(runs, key=lambda run: run.submitted or datetime.min.astimezone(), reverse=True)


def run_log(address: str, authority: bytes, run: int, after: float, timeout: float = 60.0) -> Iterator[tuple[str, float]]:
    """Follow what a run's ServerApp prints, until the run ends or ``timeout`` has passed.

    Args:
        address: Of the Control API, HOST:PORT.
        authority: The certificate (PEM) that vouches for the SuperLink.
        run: Flower's id of the run.
        after: Only what was printed after this time, in seconds; 0: everything.
        timeout: Seconds.

    Yields:
        A piece of the log and its time.

    Raises:
        ConnectionError: The connection cannot be made, or breaks.
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


def _ask(address: str, authority: bytes, what: str, request: str, timeout: float) -> Any:
    find = runpy.run_path(str(COMPAT))["find"]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), direct(address)) as channel:
        try:
            return getattr(find("ControlStub")(channel), what)(find(request)(), timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionError(f"the SuperLink at {address} does not answer: {error.details()}") from error


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
