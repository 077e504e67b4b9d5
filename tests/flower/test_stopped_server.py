"""A call to a server that stops is repeated, also if the server was sending its reply. The control is Flower's own invoker."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fl_bn.flower.compat import repeat_cancelled

LARGE = b"0" * 5_000_000  # bytes: too many for the buffers between two processes, so a call takes until its reader has read them
CALLERS = 16
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def server(port: int = 0) -> tuple[grpc.Server, int]:
    """Start a server whose every reply is large; return it and its port."""
    made = grpc.server(ThreadPoolExecutor(CALLERS), options=UNLIMITED)
    pull = grpc.unary_unary_rpc_method_handler(lambda request, context: LARGE)
    made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Service", {"Pull": pull}),))
    port = made.add_insecure_port(f"127.0.0.1:{port}")
    made.start()
    return made, port


def invoker_of_flower() -> Any:
    """Return Flower's own invoker, which later versions lack."""
    from flwr.common.retry_invoker import _make_simple_grpc_retry_invoker

    return _make_simple_grpc_retry_invoker()


pinned = pytest.mark.pinned("later versions of Flower call over HTTP")


@pinned
@pytest.mark.slow
@pytest.mark.parametrize("changed", [True, False])
def test_a_reply_that_a_stopping_server_cancels_is_fetched_again(changed: bool) -> None:
    running, port = server()
    codes, given_up = list[str](), list[str]()
    for _ in range(10):  # until gRPC says of a call that it was cancelled
        over = Event()

        def call(over: Event = over) -> None:
            invoker = invoker_of_flower()
            if changed:
                repeat_cancelled(invoker)
            with grpc.insecure_channel(f"127.0.0.1:{port}", options=UNLIMITED) as channel:
                pull = counted(channel.unary_unary("/Service/Pull"), codes)
                while not over.is_set():
                    try:
                        assert invoker.invoke(pull, b"") == LARGE
                    except grpc.RpcError as error:
                        given_up.append(error.code().name)

        callers = [Thread(target=call) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        time.sleep(0.5)
        running.stop(0).wait()
        running, _ = server(port)
        over.set()
        for caller in callers:
            caller.join()
        if "CANCELLED" in codes:
            break
    running.stop(None)
    assert "CANCELLED" in codes
    assert given_up == ([] if changed else ["CANCELLED"] * codes.count("CANCELLED")), "control: Flower gives up"


def counted(pull: Any, codes: list[str]) -> Any:
    """Return ``pull``, with the gRPC code of each failed call appended to ``codes``."""

    def call(request: bytes) -> Any:
        try:
            return pull(request)
        except grpc.RpcError as error:
            codes.append(error.code().name)
            raise

    return call


@pinned
def test_a_call_that_this_process_ends_is_not_repeated() -> None:
    invoker = invoker_of_flower()
    repeat_cancelled(invoker)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        channel = grpc.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
        closing = Thread(target=lambda: (time.sleep(0.3), channel.close()))
        closing.start()
        with pytest.raises(grpc.RpcError) as caught:
            invoker.invoke(channel.unary_unary("/Service/Pull"), b"")
        closing.join()
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]


@pytest.mark.parametrize("given_up", [True, False])
def test_flower_decides_about_errors_that_are_not_of_grpc(given_up: bool) -> None:
    invoker = SimpleNamespace(should_giveup=lambda error: given_up)
    repeat_cancelled(invoker)
    assert invoker.should_giveup(ConnectionResetError("the server of a later Flower stopped")) is given_up
