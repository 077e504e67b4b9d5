"""Flower's versions: what has moved is found, what is missing is said, and a plain run does without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from flwr.common.logger import FLOWER_LOGGER
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fl_bn.flower import compat, in_process
from fl_bn.flower.log import LOGGER
from fl_bn.flower.wire.codec import NUMPY
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS
from fl_bn_site.commands import SUPERLINK, check_flower
from tests.integration.runs import TINY
from tests.listed import listed

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = {  # and the simulation
    "start_vce",
    *("InMemoryLinkState", "SqliteLinkState", "SqliteObjectStore", "run_superlink", "BasicActorPool", "start_client_internal"),
    *("flower_supernode", "create_channel", "get_flwr_dir", "run_from_proto", "ErrorCode", "ClientAppIoStub", "ListAppsToLaunchRequest"),
    *("RequestTokenRequest", "GetRunRequest", "HeartbeatSender", "make_app_heartbeat_fn_grpc", "pull_clientappinputs"),
    *("push_clientappoutputs", "get_project_config", "get_metadata_from_config", "get_load_client_app_fn", "start_parent_process_monitor"),
    *("InMemoryNodeState", "ClientAppIoServicer", "SendAppHeartbeatRequest", "SendAppHeartbeatResponse"),
    *("StartRunRequest", "Fab", "NOOP_FEDERATION", "parse_config_args", "user_config_to_proto", "build_fab_from_disk"),
    *("run_health_server_grpc_no_tls", "_wrap_stub", "_make_simple_grpc_retry_invoker"),
}
pinned = pytest.mark.pinned("the SuperLink and the simulation that fl-bn repairs are this version's")


NEW = ("TaskIdentity",)


@listed("name", [name for name in compat.PLACES if name not in {*DEPLOYMENTS, *NEW}])
def test_what_has_moved_is_found(name: str) -> None:
    assert getattr(compat, name) is compat.find(name)


@pinned
@listed("name", sorted(DEPLOYMENTS))
def test_what_deployments_need_is_found(name: str) -> None:
    assert getattr(compat, name) is compat.find(name)


def test_names_of_flowers_that_are_written_here_are_flowers() -> None:
    from flwr.common.secure_aggregation import secaggplus_constants

    assert Array(np.zeros(1)).stype == NUMPY
    assert secaggplus_constants.RECORD_KEY_CONFIGS == RECORD_KEY_CONFIGS
    assert FLOWER_LOGGER is LOGGER


def test_what_no_version_has_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.PLACES, "Nothing", ("flwr.app", "flwr.nowhere.at.all"))
    with pytest.raises(ImportError, match=r"expected Nothing in flwr.app or flwr.nowhere.at.all, but Flower .* pip install 'flwr"):
        compat.find("Nothing")
    monkeypatch.setitem(compat.PLACES, "Nothing", ("flwr.nowhere", "flwr.app"))
    monkeypatch.setattr("flwr.app.Nothing", 5, raising=False)
    assert compat.find("Nothing") == 5  # control: at its second place
    with pytest.raises(ImportError, match=r"expected a module flwr.nowhere, but Flower .* pip install 'flwr"):
        compat.copy_of("flwr.nowhere")
    with pytest.raises(AttributeError):
        compat.Nobody  # noqa: B018


def test_a_package_that_flower_misses_is_not_taken_for_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(compat.PLACES, "Thing", ("needs_more", "flwr.app"))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        compat.find("Thing")


# Deployments


@pytest.mark.parametrize(("here", "serves"), [("1.25.0", True), ("1.25.7", True), ("1.42.0", False), ("1.250.0", False), ("2.0", False)])
def test_a_deployment_says_which_flower_it_needs(here: str, serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: here)
    if serves:
        check_flower("a part")
    else:
        with pytest.raises(ValueError, match=rf"a part needs Flower 1\.25, but flwr {here} is installed: .* pip install 'flwr.*1\.25"):
            check_flower("a part")


def test_the_superlink_does_not_start_on_another_flower(tmp_path: Path) -> None:
    (tmp_path / "flwr-9.9.0.dist-info").mkdir()
    (tmp_path / "flwr-9.9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 9.9.0\n")
    found = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-P", SUPERLINK], env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("fl-bn's SuperLink needs Flower 1.25, but flwr 9.9.0 is installed")


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
    extras = project["project"]["optional-dependencies"]
    with_deployment = {name for name, stated in extras.items() if re.search(r"fl-bn\[[^]]*\bdeployment\b", " ".join(stated))}
    assert with_deployment == set()
    ((one, other),) = project["tool"]["uv"]["conflicts"]
    assert one == {"extra": "deployment"}
    assert other["extra"] in extras
    assert re.search(r"fl-bn\[[^]]*\bdeployment\b", "fl-bn[report,deployment]")  # control


def test_the_options_of_a_simulation_are_written_as_this_flower_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num-supernodes": 5, "backend.client-resources.num-gpus": 0.2, "backend.init-args.num-cpus": 3}
    monkeypatch.setattr(compat, "version", lambda name: "1.25.0")
    pinned = "options.num-supernodes=5 options.backend.client-resources.num-gpus=0.2 options.backend.init-args.num-cpus=3"
    assert compat.federation_config(options) == f'--federation-config "{pinned}"'
    assert "options.num-supernodes=... " in compat.federation_config({"backend.init-args.num-cpus": 3})  # else Flower knows no number
    monkeypatch.setattr(compat, "version", lambda name: "1.42.0")
    assert compat.federation_config(options) == '--federation-config "num-supernodes=5 client-resources-num-gpus=0.2 init-args-num-cpus=3"'


TABLE = re.compile(r"^\| (?P<part>[^|]+) \| (?P<first>[\d.]+) \| (?P<last>[\d.]+) \|", re.MULTILINE)


def test_the_page_says_until_which_flower_each_part_is_known_to_work() -> None:
    page = (ROOT / "docs/how-to/flower-versions.md").read_text()
    stated = {found["part"]: (found["first"], found["last"]) for found in TABLE.finditer(page)}
    assert stated == {part: (compat.DEPLOYED, last) for part, last in compat.PARTS.items()}
    assert set(compat.PARTS.values()) == {compat.DEPLOYED, compat.NEWEST}
    assert SpecifierSet(compat.LIBRARY).contains(compat.NEWEST)
    other = page.replace(f"| {compat.NEWEST} |", "| 1.99 |", 1)
    assert TABLE.findall(other) != TABLE.findall(page)  # control


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
    ours -= {"fl_bn.flower.secagg.instruction_history"}  # for every client
    found.append([name for name in sys.modules if "secure_aggregation" in name or name in ours])
print(json.dumps([theirs, *found]))
"""


def test_a_plain_run_loads_nothing_of_secure_aggregation(tmp_path: Path) -> None:
    config = {**TINY, "rounds": 1, "output": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(config)], cwd=ROOT, capture_output=True, text=True, check=True)
    theirs, plain, secure = json.loads(done.stdout.splitlines()[-1])
    assert theirs  # control: these would be found
    assert plain == []
    assert {"fl_bn.flower.secagg.masks", "fl_bn.flower.secagg.client", "fl_bn.flower.secagg.rounds"} <= set(secure)


# What Flower's own did before: apps by name, and a grid's run


def test_apps_by_name_may_lie_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app_of_this_test.py").write_text("from flwr.clientapp import ClientApp\nclass Parts:\n    app = ClientApp()\nnumber = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load: Any = in_process._loaded
    assert isinstance(load("app_of_this_test:Parts.app", in_process.ClientApp), in_process.ClientApp)
    with pytest.raises(TypeError, match="app_of_this_test:number must be a ClientApp, but is a int"):
        load("app_of_this_test:number", in_process.ClientApp)
    for wrong in ("app_of_this_test:missing", "app_of_this_test", "no_such_module:app", ""):
        with pytest.raises(ValueError, match=r"expected a ClientApp at .* \(module:name\), but"):
            load(wrong, in_process.ClientApp)


def test_a_grid_takes_a_run_and_its_number() -> None:
    grid = in_process.InProcessGrid(in_process.ClientApp(), 2, {})
    assert grid.run.run_id == 1
    grid.set_run(7)
    assert grid.run.run_id == 7
    grid.set_run(type("Run", (), {"run_id": 8})())
    assert grid.run.run_id == 8
