"""Flower's versions: requirements, names that are written here, and calls that a stopping server cancels, which are repeated."""

from __future__ import annotations

import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array
from flwr.common.logger import FLOWER_LOGGER
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fl_bn.flower import compat
from fl_bn.flower.compat import LOGGER, repeat_cancelled
from fl_bn.flower.wire.codec import NUMPY
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS

ROOT = Path(__file__).parents[2]


def test_names_of_flowers_that_are_written_here_are_flowers() -> None:
    from flwr.common.secure_aggregation import secaggplus_constants

    assert Array(np.zeros(1)).stype == NUMPY
    assert secaggplus_constants.RECORD_KEY_CONFIGS == RECORD_KEY_CONFIGS
    assert FLOWER_LOGGER is LOGGER


def test_the_requirements_are_the_versions_that_serve() -> None:
    """The library's is wide; deployments start and repair Flower's own programs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    versions = ("1.24.9", "1.25.0", "1.25.9", "1.26.0", "1.42.0", "2.0")

    def taken(stated: list[str]) -> list[str]:
        (flower,) = (found for found in map(Requirement, stated) if found.name == "flwr")
        return list(flower.specifier.filter(versions))

    library = list(SpecifierSet(compat.LIBRARY).filter(versions))
    assert taken(project["dependencies"]) == taken(extras["simulation"]) == library == ["1.25.0", "1.25.9", "1.26.0", "1.42.0"]
    deployed = list(SpecifierSet(f"=={compat.DEPLOYED}.*").filter(versions))
    assert taken(extras["deployment"]) == deployed == ["1.25.0", "1.25.9"]


class Stopping(grpc.GenericRpcHandler):
    """A server that cancels the first call, as one that stops does, answers the second, and never the third."""

    calls = 0

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        if self.calls == 1:
            context.abort(grpc.StatusCode.CANCELLED, "the server stops")
        while self.calls == 3 and context.is_active():
            time.sleep(0.02)
        return b"done"


@pytest.mark.pinned("later versions of Flower call over HTTP")
def test_a_call_that_the_server_cancels_is_repeated_and_one_that_this_process_ends_is_not() -> None:
    from flwr.common.retry_invoker import _make_simple_grpc_retry_invoker

    server, handler = grpc.server(ThreadPoolExecutor(2)), Stopping()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    invoker: Any = _make_simple_grpc_retry_invoker()
    repeat_cancelled(invoker)
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary("/Service/Pull")
    assert (invoker.invoke(call, b""), handler.calls) == (b"done", 2)
    closing = Thread(target=lambda: (time.sleep(0.3), channel.close()))
    closing.start()
    with pytest.raises(grpc.RpcError) as caught:
        invoker.invoke(call, b"")
    closing.join()
    server.stop(None)
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
