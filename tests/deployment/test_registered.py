"""A run's log over Flower's Control API, under TLS: piece by piece, until the run, the time or the connection ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from flwr.proto.control_pb2 import StreamLogsResponse
from flwr.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server

from fl_bn_site.folders import ServerFolder
from fl_bn_site.registered import run_log
from tests.deployment.tls_servers import free_range


class Logs(ControlServicer):
    """Three pieces of run 7; the log of run 8 does not end; the connection of run 9 breaks."""

    def StreamLogs(self, request: Any, context: Any) -> Iterator[StreamLogsResponse]:
        for number in range(1, 4):
            if number > request.after_timestamp:
                yield StreamLogsResponse(log_output=f"{number}\n", latest_timestamp=float(number))
        if request.run_id == 9:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        while request.run_id == 8 and context.is_active():
            time.sleep(0.1)


@pytest.fixture
def address(server: ServerFolder) -> Iterator[str]:
    serving = grpc.server(ThreadPoolExecutor(2))
    add_ControlServicer_to_server(Logs(), serving)
    pair = (server.path / "server.key").read_bytes(), (server.path / "server.crt").read_bytes()
    address = f"127.0.0.1:{free_range(1)}"
    serving.add_secure_port(address, grpc.ssl_server_credentials([pair]))
    serving.start()
    yield address
    serving.stop(None).wait()


def test_a_log_comes_from_where_it_was_left(server: ServerFolder, address: str) -> None:
    authority = server.authority.read_bytes()
    assert list(run_log(address, authority, 7, 0.0)) == [("1\n", 1.0), ("2\n", 2.0), ("3\n", 3.0)]
    assert list(run_log(address, authority, 7, 2.0)) == [("3\n", 3.0)]
    assert list(run_log(address, authority, 8, 2.0, timeout=1.0)) == [("3\n", 3.0)]


def test_a_connection_that_breaks_is_said_after_what_came(server: ServerFolder, address: str) -> None:
    log = run_log(address, server.authority.read_bytes(), 9, 1.0)
    assert [next(log), next(log)] == [("2\n", 2.0), ("3\n", 3.0)]
    with pytest.raises(ConnectionError, match="Socket closed"):
        next(log)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1 does not answer"):
        next(run_log("127.0.0.1:1", server.authority.read_bytes(), 7, 0.0))
