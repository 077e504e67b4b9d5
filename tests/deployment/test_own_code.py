"""What is sent of a user's own code: a Flower app, or modules beside fl-bn's app."""

from __future__ import annotations

import io
import zipfile
from datetime import datetime
from pathlib import Path

import pytest

from fl_bn.app.errors import ConfigError
from fl_bn_site.own_config import own_config
from fl_bn_site.project import OF_RUN
from tests.deployment.inner import FolderError, Package, ServerFolder, build
from tests.refusals import naming

NOW = datetime(2026, 11, 26, 21, 30)


def names(package: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(package)).namelist())


def test_a_flower_app_of_one_s_own_is_packed_as_it_is_with_the_keys_of_its_run(server: ServerFolder, own_app: Path) -> None:
    before = (own_app / "pyproject.toml").read_text()
    package = Package(build(server, own_app))
    assert "myapp/client_app.py" in names(package.content)
    assert not any(name.startswith("fl_bn/") for name in names(package.content))
    assert package.defaults == {**OF_RUN, "num-server-rounds": 10, "local-epochs": 2, "batch-size": 32, "lr": 0.01}
    assert (own_app / "pyproject.toml").read_text() == before, "the user's own file is as it was"
    given = {"lr": 1, "num-server-rounds": 3}
    assert own_config(package, "lr=1 num-server-rounds=3", NOW) == ({**given, "name": f"20261126-213000-{package.project}"}, True)
    assert own_config(package, "name='mine'", NOW) == ({"num-server-rounds": 10, "name": "mine"}, False), "the rounds that are planned"
    for wrong, key in {"num-rounds=3": "num-rounds", "method='hbn'": "method", "num-server-rounds='3'": "int", "lr=true": "lr"}.items():
        with naming(key, ConfigError):
            own_config(package, wrong, NOW)


def test_modules_are_packed_beside_fl_bn_s_app_and_what_is_no_code_is_refused(server: ServerFolder, own_app: Path, tmp_path: Path) -> None:
    modules = tmp_path / "own"
    for name in ("mynets.py", "parts/more.py", "scan.npz", ".venv/hidden.py"):
        (modules / name).parent.mkdir(parents=True, exist_ok=True)
        (modules / name).write_text("x = 1\n")
    assert names(build(server, modules)) - names(build(server)) == {"mynets.py", "parts/more.py"}, "modules, and no data"
    (tmp_path / "empty").mkdir()
    (modules / "server_app.py").write_text("")  # as a module of fl-bn's own project is called
    for folder, word in ((tmp_path / "none", "none"), (tmp_path / "empty", "empty"), (modules, "server_app")):
        with naming(word, FolderError):
            build(server, folder)
    file = own_app / "pyproject.toml"
    for text in (file.read_text().replace("myapp.client_app:app", "nowhere.client_app:app"), '[project]\nname = "no-app"\n'):
        file.write_text(text)
        with pytest.raises(FolderError):
            build(server, own_app)
