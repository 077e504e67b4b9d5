"""The newest Flower, started as a user starts it: the project and a new app on Ray, and a new app with SuperLink and SuperNodes."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from fl_bn.flower.compat import DEPLOYED, NEWEST
from tests.examples.flower_apps import APPS
from tests.examples.test_flower_apps import SHOWN
from tests.experiment.inside import override
from tests.integration.runs import TINY, bits, differences, tiny
from tests.integration.test_ray import as_on_ray
from tests.newest.conftest import Newest
from tests.packaging.conftest import ROOT, copied
from tests.packaging.test_new import accuracies, printed

pytestmark = [pytest.mark.newest, pytest.mark.timeout(600)]
APP = ("fl_bn", "fl_bn_site", "server_app", "client_app", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def test_it_is_the_newest_and_the_page_knows_it(newest: Newest) -> None:
    code = "import flwr; from importlib.metadata import version; print(version('flwr'), flwr.__file__)"
    version, file = newest.run("python", "-c", code, folder=newest.folder).split()
    assert file.startswith(str(newest.folder))
    assert not version.startswith(f"{DEPLOYED}."), "the newest Flower is not tested"
    if not version.startswith(f"{NEWEST}."):
        print(f"\nflwr {version} is newer than {NEWEST}: if all tests pass, write it as NEWEST in compat.py, and on its page")


def test_the_project_gives_the_bits_of_a_run_in_process(newest: Newest, tmp_path: Path) -> None:
    project = copied(APP, tmp_path / "project")
    config = override({**TINY, "method": "fbn", "output": str(tmp_path), "name": "user"})
    said = newest.run("flwr", "run", ".", "--stream", "--run-config", config, "--federation-config", "num-supernodes=3", folder=project)
    assert "[round 3/3] 3/3 clients" in said
    assert "App dependencies installed successfully via uv sync" in said, "as users have it: without the variable that switches this off"
    assert differences(bits(tiny(tmp_path, "fbn", **as_on_ray("fbn"))), bits(tmp_path / "user")) == []
    assert differences(bits(tiny(tmp_path / "other", "fbn", seed=1, **as_on_ray("fbn"))), bits(tmp_path / "user")) != []  # control


def test_the_command_that_a_new_app_prints_runs_as_it_is(installed: Newest, tmp_path: Path) -> None:
    command = printed(installed.run("fl-bn", "new", "my-app", folder=tmp_path))
    said = installed.run("bash", "-c", command, folder=tmp_path)
    assert "(5 simulated SuperNodes)" in said
    assert "App dependencies installed successfully via uv sync" in said, "as users have it: without the variable that switches this off"
    assert len(accuracies(re.sub(r"\x1b\[\d+m", "", said))) == 10, said
    moved = tomllib.loads((installed.folder / installed.home / "config.toml").read_text())["superlink"]
    assert moved["default"] == "my-app-simulation"
    app = tmp_path / "my-app"
    assert "federations" not in tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]
    assert len(accuracies(installed.run("python", "run.py", folder=app))) == 10


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "niid_bench")) for name in SHOWN])
def test_a_converted_app_runs(name: str, newest: Newest, tmp_path: Path) -> None:
    shutil.copytree(APPS / name / "after", tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    said = newest.run("flwr", "run", ".", "--stream", "--run-config", SHOWN[name][0], folder=tmp_path / name)
    assert [line for line in SHOWN[name][1] if line not in said] == [], said


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["walk", "missing_sites", "federation"])
def test_a_deployment_works(name: str, newest: Newest) -> None:
    """The tests of deployments on real processes start the programs of the Python that runs them."""
    words = ("-q", "-n", "0", "-m", "", "-W", "ignore::DeprecationWarning", f"tests/deployment/test_{name}.py")
    newest.run("python", "-m", "pytest", *words, folder=ROOT, timeout=7000)
