"""Whose functions a run config may name: the app's own, and those of modules that the machine's owner allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fl_bn.app import assembly, setup
from fl_bn.app.client import build_client
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.flower import run_in_process
from fl_bn.support.user_code import OWN, VARIABLE, Modules, Refused, function
from tests.listed import listed
from tests.refusals import naming

NAMES = ("theirs", "packaged", "beside", "beside_too", "trap", "spread", "spread.mine")
DATA = """
from os import system
from torch import nn
import numpy as np

def load(path):
    return np.zeros((12, 4), np.float32) + np.arange(4), np.arange(12) % 2, np.ones((2, 4), np.float32), np.array([0, 1])

def build(classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels, 3), nn.BatchNorm1d(3), nn.Linear(3, classes))
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Flower app's folder with the package ``packaged``, beside a folder of the machine's with the module ``theirs``.

    ``trap`` raises when it is imported.
    """
    folder, other, installed = tmp_path / "app", tmp_path / "other", tmp_path / "lib/site-packages"
    for made in (folder / "packaged", folder / "spread", other / "spread", installed):
        made.mkdir(parents=True)
    for made in (installed, other, folder):
        monkeypatch.syspath_prepend(made)
    (folder / "pyproject.toml").write_text("[tool.flwr.app]\npublisher = 'x'\n")
    (folder / "packaged/__init__.py").write_text("from theirs import load as borrowed\n" + DATA)
    (folder / "beside.py").write_text(DATA)
    (folder / "spread/mine.py").write_text(DATA)
    (other / "spread/alien.py").write_text(DATA)
    (other / "theirs.py").write_text(DATA)
    (installed / "beside_too.py").write_text(DATA)
    (installed / "trap.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(setup, "_modules", setup._modules)
    yield folder
    for name in NAMES:
        sys.modules.pop(name, None)
    assembly.forget()


GIVEN: dict[str, tuple[str, str]] = {  # who may name functions: the app's folder, and what its owner allows
    "app": ("app", ""),
    "an app among installed packages": ("lib/site-packages", ""),
    "allowed": ("app", "theirs, torchvision.models"),
    "own process": ("", OWN),
}
FUNCTIONS: dict[str, dict[str, str]] = {  # and words of the refusal, by who names it; "": the function is taken
    "beside:load": {"app": "", "allowed": ""},
    "packaged:load": {"app": "", "allowed": ""},
    "theirs:load": {"app": "theirs is in", "allowed": "", "own process": ""},
    "theirs:system": {"allowed": "it was defined elsewhere: posix", "own process": "posix"},
    "os:system": {"app": "os is Python's own module", "own process": "os is"},
    "torch.hub:load": {"app": "torch.hub is in", "own process": "torch.hub"},
    "beside_too:load": {"app": "site-packages", "an app among installed packages": "site-packages", "own process": "beside_too"},
    "spread.mine:load": {"app": ""},  # without an __init__ the package is in several folders
    "spread.alien:load": {"app": "spread.alien is in"},
    "trap:load": {"app": "trap is in"},
    "beside:system": {"app": "it was defined elsewhere: posix is Python's own"},
    "packaged:borrowed": {"app": "it was defined elsewhere: theirs is in", "allowed": ""},
    "torchvision.models_x:f": {"allowed": "torchvision"},
    "fl_bn.support.durable:set_aside": {"app": "fl_bn.support.durable is part of fl-bn", "own process": "part of fl-bn"},
    "nowhere_at_all:load": {"app": "there is no module 'nowhere_at_all'"},
}


@listed("name", FUNCTIONS)
def test_a_function_is_the_apps_or_one_that_the_owner_allows(app: Path, name: str) -> None:
    for who, reason in FUNCTIONS[name].items():
        folder, allowed = GIVEN[who]
        modules = Modules.of(app.parent / folder if folder else None, allowed)
        if reason:
            with naming(reason, Refused):
                function("data", name, modules)
        else:
            assert callable(function("data", name, modules))


def test_an_environment_variable_allows_modules_too(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "beside_too")
    assert function("data", "beside_too:load", Modules.of(app)).__module__ == "beside_too"


@pytest.mark.parametrize("key", ["dataset", "model", "task"])
def test_a_run_config_runs_no_command(key: str, app: Path, tmp_path: Path) -> None:
    """What was possible: ``dataset='os:system' data-path='...'`` ran a command at the server and at every client."""
    marker = tmp_path / "ran"
    command = {key: "os:system"} | ({"data-path": f"touch {marker}"} if key == "dataset" else {})
    config = {"clients": 2, "rounds": 1, "output": "", "pictures": False, **command}
    with naming("os:system' is not called: os is Python's own", ConfigError):
        run_in_process(RunConfig.from_mapping(config).to_mapping())
    assert not marker.exists()


def client(node: dict[str, str | int], **config: object) -> object:
    values = {"clients": 2, "rounds": 1, "output": "", "method": "fedavg", "batch-size": 2, **config}
    whole = RunConfig.from_mapping({name.replace("_", "-"): value for name, value in values.items()}).to_mapping()
    return build_client(Context(1, 1, {"partition-id": 0, "num-partitions": 2, **node}, RecordDict(), whole))


@pytest.mark.parametrize("own", [{}, {"dataset": "theirs:load", "data-path": "x"}], ids=["share of the run's", "own data"])
def test_a_client_refuses_it_too(app: Path, tmp_path: Path, own: dict[str, str | int]) -> None:
    """Also one with data of its own, which asked the run's for their shape."""
    marker = tmp_path / "ran"
    with naming("os:system' is not called", ConfigError):
        client(own, dataset="os:system", data_path=f"touch {marker}", partition="iid", model="mlp")
    with naming("your own task 'os:system' is not called", ConfigError):
        client(own, task="os:system", dataset="digits-plain", partition="iid")
    assert not marker.exists()


def test_a_sites_node_config_names_any_module_for_its_own_data(app: Path) -> None:
    """That is the site's own word; it does not allow the run config the same."""
    shape = {"classes": 2, "channels": 4, "image_size": 1, "dataset": "sites"}
    made = client({"dataset": "theirs:load", "data-path": "x"}, model="mlp", **shape)
    assert len(made.site.train) == 12  # type: ignore[attr-defined]
    with naming("theirs:build' is not called", ConfigError):
        client({"dataset": "theirs:load", "data-path": "x"}, model="theirs:build", **shape)
    allowed = client({"dataset": "theirs:load", "data-path": "x", "allow-modules": "theirs"}, model="theirs:build", **shape)
    assert len(allowed.site.train) == 12  # type: ignore[attr-defined]
