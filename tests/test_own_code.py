"""Whose functions a run config may name: the app's own, and those of modules that the machine's owner allows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from fl_bn.apps.client import build_client
from fl_bn.data.dataset import load
from fl_bn.flower import run_in_process
from fl_bn.models import build
from fl_bn.run import assembly, setup
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.support.user_code import OWN, VARIABLE, Modules, Refused, function
from fl_bn_site.commands import commands, node_config
from fl_bn_site.folders import ServerFolder, SiteFolder
from fl_bn_site.kit import KitPlan, create
from tests.listed import listed

NAMES = ("theirs", "packaged", "beside", "beside_too", "trap")
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
    for made in (folder / "packaged", other, installed):
        made.mkdir(parents=True)
        monkeypatch.syspath_prepend(made)
    (folder / "pyproject.toml").write_text("[tool.flwr.app]\npublisher = 'x'\n")
    (folder / "packaged/__init__.py").write_text("from theirs import load as borrowed\n" + DATA)
    (folder / "beside.py").write_text(DATA)
    (other / "theirs.py").write_text(DATA)
    (installed / "beside_too.py").write_text(DATA)
    (installed / "trap.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(setup, "_modules", setup._modules)
    yield folder
    for name in NAMES:
        sys.modules.pop(name, None)
    assembly.forget()


def test_the_apps_own_modules_are_taken(app: Path) -> None:
    modules = Modules.of(app)
    assert function("data", "beside:load", modules).__module__ == "beside"
    assert function("data", "packaged:load", modules).__module__ == "packaged"


def test_a_package_that_other_folders_continue_is_taken_from_the_app_alone(app: Path) -> None:
    """Without an __init__ it is in several folders at once; the app's comes first on the path."""
    for folder, name in ((app, "mine"), (app.parent / "other", "mine"), (app.parent / "other", "alien")):
        (folder / "shared_name").mkdir(exist_ok=True)
        (folder / "shared_name" / f"{name}.py").write_text(DATA + f"\nWHERE = {str(folder)!r}\n")
    found = function("data", "shared_name.mine:load", Modules.of(app))
    where = sys.modules[found.__module__].WHERE
    assert where == str(app)
    with pytest.raises(Refused, match="shared_name.alien is in"):
        function("data", "shared_name.alien:load", Modules.of(app))
    for name in ("shared_name.mine", "shared_name"):
        sys.modules.pop(name, None)


@listed(
    ("name", "reason"),
    [
        ("os:system", "os is Python's own module; a run config may name functions of the app's own modules"),
        ("posix:system", "posix is Python's own"),
        ("shutil:rmtree", "shutil is Python's own"),
        ("importlib.util:find_spec", "importlib.util is Python's own"),
        ("torch.hub:load", "torch.hub is in .*site-packages"),
        ("theirs:load", "theirs is in .*other"),
        ("trap:load", "trap is in .*site-packages"),
        ("beside:system", "it was defined elsewhere: posix is Python's own"),
        ("packaged:borrowed", "it was defined elsewhere: theirs is in"),
        ("fl_bn.support.durable:set_aside", "fl_bn.support.durable is part of fl-bn"),
        ("fl_bn.apps.client:build_client", "part of fl-bn"),
        ("nowhere_at_all:load", "there is no module 'nowhere_at_all'"),
    ],
)
def test_other_names_are_refused(app: Path, name: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        function("data", name, Modules.of(app))


def test_what_the_owner_allows_is_taken(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Modules.of(app, "theirs, torchvision.models")
    assert function("data", "theirs:load", modules).__module__ == "theirs"
    with pytest.raises(Refused, match="it was defined elsewhere: posix"):
        function("data", "theirs:system", modules)
    with pytest.raises(Refused, match="beside_too is in"):
        function("data", "beside_too:load", modules)
    for name in ("torchvision:disable_beta_transforms_warning", "torchvision.models_x:f"):
        with pytest.raises(Refused, match="torchvision"):
            function("data", name, modules)
    monkeypatch.setenv(VARIABLE, "beside_too")
    assert function("data", "beside_too:load", Modules.of(app)).__module__ == "beside_too"


def test_the_owners_own_process_takes_any_module_that_is_not_installed(app: Path) -> None:
    own = Modules.of(None, OWN)
    assert function("data", "theirs:load", own).__module__ == "theirs"
    for name in ("os:system", "beside_too:load", "torch.hub:load", "theirs:system", "fl_bn.support.durable:set_aside"):
        with pytest.raises(Refused):
            function("data", name, own)


def test_a_folder_of_installed_packages_is_no_app() -> None:
    """A wheel lies beside torch, whose functions a run config may not name."""
    installed = Path(torch.__file__).parents[1]
    assert Modules.of(installed).app is None
    with pytest.raises(Refused, match="site-packages"):
        function("data", "torch.hub:load", Modules.of(installed))


@pytest.mark.parametrize("key", ["dataset", "model", "task"])
def test_a_run_config_runs_no_command(key: str, app: Path, tmp_path: Path) -> None:
    """What was possible: ``dataset='os:system' data-path='...'`` ran a command at the server and at every client."""
    marker = tmp_path / "ran"
    command = {key: "os:system"} | ({"data-path": f"touch {marker}"} if key == "dataset" else {})
    config = {"clients": 2, "rounds": 1, "output": "", "pictures": False, **command}
    with pytest.raises(ConfigError, match="os:system' is not called: os is Python's own"):
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
    with pytest.raises(ConfigError, match="os:system' is not called"):
        client(own, dataset="os:system", data_path=f"touch {marker}", partition="iid", model="mlp")
    with pytest.raises(ConfigError, match="your own task 'os:system' is not called"):
        client(own, task="os:system", dataset="digits-plain", partition="iid")
    assert not marker.exists()


def test_a_sites_node_config_names_any_module_for_its_own_data(app: Path) -> None:
    """That is the site's own word; it does not allow the run config the same."""
    shape = {"classes": 2, "channels": 4, "image_size": 1, "dataset": "sites"}
    made = client({"dataset": "theirs:load", "data-path": "x"}, model="mlp", **shape)
    assert len(made.site.train) == 12  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="theirs:build' is not called"):
        client({"dataset": "theirs:load", "data-path": "x"}, model="theirs:build", **shape)
    allowed = client({"dataset": "theirs:load", "data-path": "x", "allow-modules": "theirs"}, model="theirs:build", **shape)
    assert len(allowed.site.train) == 12  # type: ignore[attr-defined]


def test_a_function_beside_the_app_serves_a_run_in_process(app: Path) -> None:
    config = {"clients": 2, "rounds": 1, "output": "", "partition": "iid", "batch-size": 2, "method": "fedavg"}
    config |= {"dataset": "theirs:load", "model": "theirs:build"}
    assert run_in_process(RunConfig.from_mapping(config).to_mapping()) is None


def test_the_library_takes_what_its_caller_names(app: Path) -> None:
    assert load("theirs:load").classes == 2
    assert isinstance(build("beside_too:build", classes=2, channels=4), torch.nn.Module)


def test_a_kit_hands_on_what_its_owner_allows(tmp_path: Path) -> None:
    create(KitPlan("127.0.0.1", ("A", "B")), tmp_path / "kit")
    for file, line in (("server/server.toml", 'allow-modules = ""'), ("sites/A/site.toml", 'allow-modules = ""')):
        path = tmp_path / "kit" / file
        text = path.read_text()
        assert line in text
        path.write_text(text.replace(line, 'allow-modules = "hospital.nets"'))
    assert node_config(SiteFolder.read(tmp_path / "kit/sites/A"))["allow-modules"] == "hospital.nets"
    assert "allow-modules" not in node_config(SiteFolder.read(tmp_path / "kit/sites/B"))
    serverapp = next(c for c in commands(ServerFolder.read(tmp_path / "kit/server")) if c.name == "serverapp")
    assert serverapp.env[VARIABLE] == "hospital.nets"
    assert os.environ.get(VARIABLE) is None
