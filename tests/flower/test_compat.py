"""Flower's versions: what has moved is found, what is missing is said, and a plain run does without."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import ServerApp
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fl_bn.flower import FedAvgBN, InProcessGrid, compat, run_in_process
from fl_bn.flower.compat import LOGGER
from fl_bn.flower.wire.codec import NUMPY
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn_site import commands
from tests.flower.own_apps import net
from tests.integration.runs import TINY
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


def test_only_deployments_keep_an_environment_at_the_pinned_version() -> None:
    """Later versions of Flower solve pyproject.toml with all extras at once: a pin of one would be a pin of all, but for ``conflicts``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not [one for one in project["project"]["optional-dependencies"].values() if re.search(r"fl-bn\[[^]]*\bdeployment\b", str(one))]
    assert {"extra": "deployment"} in project["tool"]["uv"]["conflicts"][0]


def test_the_options_of_a_simulation_are_written_as_this_flower_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num-supernodes": 5, "backend.client-resources.num-gpus": 0.2, "backend.init-args.num-cpus": 3}
    monkeypatch.setattr(compat, "version", lambda name: "1.25.0")
    pinned = "options.num-supernodes=5 options.backend.client-resources.num-gpus=0.2 options.backend.init-args.num-cpus=3"
    assert compat.federation_config(options) == f'--federation-config "{pinned}"'
    assert "options.num-supernodes=... " in compat.federation_config({"backend.init-args.num-cpus": 3})  # else Flower knows no number
    monkeypatch.setattr(compat, "version", lambda name: "1.42.0")
    assert compat.federation_config(options) == '--federation-config "num-supernodes=5 client-resources-num-gpus=0.2 init-args-num-cpus=3"'


# Runs

RUN = """
import json, sys
import flwr.app, flwr.client, flwr.clientapp, flwr.serverapp  # import their own secure aggregation: it is taken out again
theirs = [name for name in sys.modules if "secure_aggregation" in name]
for name in theirs:
    del sys.modules[name]
from fl_bn.flower import run_in_process
found = []
for secure in (False, True):
    run_in_process({**json.loads(sys.argv[1]), "name": f"run-{secure}", "secure-aggregation": secure})
    ours = {name for name in sys.modules if name.startswith("fl_bn.flower.secagg.")}
    ours -= {"fl_bn.flower.secagg.instructions"}  # for every client
    found.append([name for name in sys.modules if "secure_aggregation" in name or name in ours])
print(json.dumps([theirs, *found]))
"""


@pytest.mark.slow
def test_a_plain_run_loads_nothing_of_secure_aggregation(tmp_path: Path) -> None:
    config = {**TINY, "rounds": 1, "output": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(config)], cwd=ROOT, capture_output=True, text=True, check=True)
    theirs, plain, secure = json.loads(done.stdout.splitlines()[-1])
    assert theirs  # control: these would be found
    assert plain == []
    assert {"fl_bn.flower.secagg.masks", "fl_bn.flower.secagg.client", "fl_bn.flower.secagg.rounds"} <= set(secure)


# What Flower's own did before: apps by name, and a grid's run


@listed(
    ("name", "kind"),
    [("Parts.app", None), ("missing", AttributeError)],
)
def test_apps_by_name_may_lie_in_the_working_directory(name: str, kind: type[Exception] | None, tmp_path: Path) -> None:
    text = "from tests.flower.own_apps import own_app\nclass Parts:\n    app = own_app('fedavg')\nnumber = 1\n"
    (tmp_path / "app_of_this_test.py").write_text(text)
    server = ServerApp()
    server.main()(lambda grid, context: FedAvgBN(net()).start(grid, num_rounds=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", list(sys.path))
        patch.delitem(sys.modules, "app_of_this_test", raising=False)
        with pytest.raises(kind, match="app_of_this_test") if kind else nullcontext():
            run_in_process({"clients": 2}, server_app=server, client_app=f"app_of_this_test:{name}")


def test_a_grid_takes_a_run_and_its_number() -> None:
    grid = InProcessGrid(ClientApp(), 2, {})
    assert grid.run.run_id == 1
    grid.set_run(7)
    assert grid.run.run_id == 7
    grid.set_run(type("Run", (), {"run_id": 8})())
    assert grid.run.run_id == 8
