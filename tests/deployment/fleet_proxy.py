"""A proxy between the sites and a SuperLink. It decrypts TLS, and counts the bytes of the sites' answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
DAY = 86_400.0


class FleetProxy(grpc.GenericRpcHandler):
    """Pass on all calls of the sites to a SuperLink, and record what they send.

    Attributes:
        trees: Id of a message -> the ids of the objects in its answer.
        objects: Id of an object -> its size in bytes, for the objects that were sent.

    Args:
        server: The server's folder of the kit, which has the certificate that the proxy presents.
        fleet: The port of the SuperLink.
        port: The port of the proxy.
    """

    def __init__(self, server: Path, fleet: int, port: int) -> None:
        authority = (server / "ca.crt").read_bytes()
        self.channel = grpc.secure_channel(f"127.0.0.1:{fleet}", grpc.ssl_channel_credentials(authority), OPTIONS)
        self.trees: dict[str, set[str]] = {}
        self.objects: dict[str, int] = {}
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=[self], options=OPTIONS)
        pair = (server / "server.key").read_bytes(), (server / "server.crt").read_bytes()
        assert self._server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair])) == port

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(1).wait()
        self.channel.close()

    def service(self, details: Any) -> Any:
        method = details.method

        def forward(request: bytes, context: grpc.ServicerContext) -> bytes:
            self._note(method.rpartition("/")[2], request)
            call = self.channel.unary_unary(method, lambda data: data, lambda data: data)
            metadata = [(key, value) for key, value in context.invocation_metadata() if key != "user-agent"]
            try:
                left = context.time_remaining()  # of a call without a deadline it is more than gRPC takes
                return call(request, metadata=metadata, timeout=left if left is not None and left < DAY else None)  # type: ignore[no-any-return]
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
                raise

        return grpc.unary_unary_rpc_method_handler(forward)

    def _note(self, method: str, data: bytes) -> None:
        with self._lock:
            if method == "PushMessages":
                request = PushMessagesRequest.FromString(data)
                for message, tree in zip(request.messages_list, request.message_object_trees, strict=True):
                    self.trees[message.metadata.reply_to_message_id] = set(_ids(tree))
            elif method == "PushObject":
                pushed = PushObjectRequest.FromString(data)
                self.objects[pushed.object_id] = len(pushed.object_content)


def _ids(tree: ObjectTree) -> Iterator[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _ids(child)
