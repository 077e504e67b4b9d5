"""Flower's versions: what has moved is found, what is missing is said, and calls that a stopping server cancels are repeated."""

from __future__ import annotations

import socket
import time
import tomllib
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fl_bn.flower import InProcessGrid, compat
from fl_bn.flower.compat import LOGGER, repeat_cancelled
from fl_bn.flower.wire.codec import NUMPY
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn_site import commands
from tests.listed import listed

ROOT = Path(__file__).parents[2]
pinned = pytest.mark.pinned("the SuperLink and the simulation that fl-bn repairs are this version's")
NAMES = [name for names in compat.PLACES.values() for name in names.split() if name != "TaskIdentity"]
LIBRARY = NAMES[: NAMES.index("BasicActorPool")]


@listed("name", LIBRARY)
def test_what_has_moved_is_found(name: str) -> None:
    assert getattr(compat, name) is compat.find(name)


@pinned
@listed("name", [name for name in NAMES if name not in LIBRARY])
def test_what_deployments_need_is_found(name: str) -> None:
    assert getattr(compat, name) is compat.find(name)


def test_names_of_flowers_that_are_written_here_are_flowers() -> None:
    from flwr.common.secure_aggregation import secaggplus_constants

    assert Array(np.zeros(1)).stype == NUMPY
    assert secaggplus_constants.RECORD_KEY_CONFIGS == RECORD_KEY_CONFIGS
    assert FLOWER_LOGGER is LOGGER


def test_what_no_version_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.PLACES, "flwr.nowhere.at.all", "Nothing")
    for call in (lambda: compat.find("Nothing"), lambda: compat.copy_of("flwr.nowhere")):
        with pytest.raises(ImportError, match="flwr.nowhere.* pip install"):
            call()
    monkeypatch.setitem(compat.PLACES, __name__, "Nothing LIBRARY")
    assert compat.find("LIBRARY") is LIBRARY  # control
    with pytest.raises(AttributeError):
        compat.Nobody  # noqa: B018


# Deployments


@listed(("here", "legacy"), [("1.25.0", True), ("1.25.7", True), ("1.42.0", False), ("1.250.0", None), ("2.0", None)])
def test_a_deployment_says_which_flower_it_needs(here: str, legacy: bool | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: here)
        if legacy is not None:
            assert commands.of_1_25() is legacy
        else:
            with pytest.raises(ValueError, match=here):
                commands.of_1_25()


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


def test_the_options_of_a_simulation_are_written_as_this_flower_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num-supernodes": 5, "backend.client-resources.num-gpus": 0.2, "backend.init-args.num-cpus": 3}
    monkeypatch.setattr(compat, "version", lambda name: "1.25.0")
    pinned = "options.num-supernodes=5 options.backend.client-resources.num-gpus=0.2 options.backend.init-args.num-cpus=3"
    assert compat.federation_config(options) == f'--federation-config "{pinned}"'
    assert "options.num-supernodes=... " in compat.federation_config({"backend.init-args.num-cpus": 3})  # else Flower knows no number
    monkeypatch.setattr(compat, "version", lambda name: "1.42.0")
    assert compat.federation_config(options) == '--federation-config "num-supernodes=5 client-resources-num-gpus=0.2 init-args-num-cpus=3"'


# Runs


# What Flower's own did before: apps by name, and a grid's run


def test_a_grid_takes_a_run_and_its_number() -> None:
    grid = InProcessGrid(ClientApp(), 2, {})
    assert grid.run.run_id == 1
    grid.set_run(7)
    assert grid.run.run_id == 7
    grid.set_run(type("Run", (), {"run_id": 8})())
    assert grid.run.run_id == 8


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code, self.details = lambda: code, lambda: "the server stops"


@listed(
    ("error", "given_up"),
    [
        (Failed(grpc.StatusCode.CANCELLED), False),
        (Failed(grpc.StatusCode.UNAVAILABLE), True),  # of these, Flower decides
        (ConnectionResetError("the server of a later Flower stopped"), True),
    ],
)
def test_a_call_that_the_server_cancels_is_repeated(error: Exception, given_up: bool) -> None:
    invoker = SimpleNamespace(should_giveup=lambda error: True)
    assert invoker.should_giveup(error)  # control: Flower gives up
    repeat_cancelled(invoker)
    assert invoker.should_giveup(error) is given_up


@pytest.mark.pinned("later versions of Flower call over HTTP")
def test_a_call_that_this_process_ends_is_not_repeated() -> None:
    from flwr.common.retry_invoker import _make_simple_grpc_retry_invoker

    invoker: Any = _make_simple_grpc_retry_invoker()
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
