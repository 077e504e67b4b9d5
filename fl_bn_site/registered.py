"""Ask the Control API of a SuperLink, by gRPC, for its nodes with their keys, for its runs, and for their logs.

fl-bn does not use Flower's command ``flwr`` for this. The command shows neither keys nor the time at which a site was
last seen. After a failed connection it may hang for ever, because a thread of gRPC holds the lock of a channel that is
never closed.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import grpc

from fl_bn.support.flower_config import OF_OUR_APP, OUR_APP
from fl_bn.support.loopback import direct
from fl_bn_site.commands import COMPAT

ADVICE = "check the address, and that `fl-bn start` runs on the server's machine"


@dataclass(frozen=True)
class Node:
    """Describe a SuperNode that is registered at the SuperLink.

    Attributes:
        id: Flower's id of the node.
        key: The public key of the node, in PEM.
        online: Whether the node is connected now.
        seen: When the node was connected last; None: it was never connected.
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
        status: Flower's status: ``pending``, ``starting``, ``running``, ``finished:completed`` or another.
        config: The run config that was submitted with the run.
        submitted: When the run was submitted; None: Flower does not tell.
        ended: When the run ended; None: it has not ended.
        started: When the run began; None: it has not begun.
        nbytes: The numbers of bytes so far, as a pair: received from the sites, sent to the sites.
        code: The SHA-256 of the package (FAB archive) that the sites receive.
        app: The id of the app, PUBLISHER/NAME; empty: not known.
    """

    id: int
    status: str
    config: Mapping[str, Any]
    submitted: datetime | None
    ended: datetime | None
    started: datetime | None = None
    nbytes: tuple[int, int] = (0, 0)
    code: str = ""
    app: str = ""

    @property
    def own(self) -> bool:
        """Return whether the run's app is a user's own Flower app. False: it is fl-bn's app, or is not known."""
        return self.app not in ("", OUR_APP) and not all(key in self.config for key in OF_OUR_APP)


def run_name(run: Submitted) -> str:
    """Return the name of a run's folder; empty where fl-bn did not submit the run."""
    return str(run.config.get("resume") or run.config.get("name") or "")


def registered_nodes(address: str, authority: bytes, timeout: float = 30.0) -> list[Node]:
    """Return the nodes that are registered at a SuperLink.

    Each node id belongs to one key. With every request, a SuperNode proves that it has the private key of its node.

    Args:
        address: The address of the Control API, HOST:PORT.
        authority: The certificate, in PEM, of the authority that signed the SuperLink's certificate.
        timeout: The seconds to wait for the answer.

    Raises:
        ConnectionError: No SuperLink with a certificate of this authority answers.
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
        address: The address of the Control API, HOST:PORT.
        authority: The certificate, in PEM, of the authority that signed the SuperLink's certificate.
        timeout: The seconds to wait for the answer.

    Raises:
        ConnectionError: No SuperLink with a certificate of this authority answers.
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
            run.fab_id,
        )
        for run in answer.run_dict.values()
    ]
    return sorted(runs, key=lambda run: run.submitted or datetime.min.astimezone(), reverse=True)


def run_log(address: str, authority: bytes, run: int, after: float, timeout: float = 60.0) -> Iterator[tuple[str, float]]:
    """Follow the log of a run, which is what its ServerApp prints.

    Args:
        address: The address of the Control API, HOST:PORT.
        authority: The certificate, in PEM, of the authority that signed the SuperLink's certificate.
        run: Flower's id of the run.
        after: Yield only what was logged after this time, in seconds since 1970; 0: yield the whole log.
        timeout: The seconds after which the iterator ends, if the run has not ended before.

    Yields:
        A piece of the log and its time. Give this time as ``after`` in another call to go on from there.

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
                raise ConnectionError(f"the SuperLink at {address} does not answer: {error.details()}; {ADVICE}") from error


def _ask(address: str, authority: bytes, what: str, request: str, timeout: float) -> Any:
    find = runpy.run_path(str(COMPAT))["find"]
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), direct(address)) as channel:
        try:
            return getattr(find("ControlStub")(channel), what)(find(request)(), timeout=timeout)
        except grpc.RpcError as error:
            raise ConnectionError(f"the SuperLink at {address} does not answer: {error.details()}; {ADVICE}") from error


def _time(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
