"""``fl-bn new``: what it writes runs as it is, in one process and on Ray; and it writes over nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.flower import run_in_process
from fl_bn.flower.population import RunFailed

ROUND = re.compile(r"^round (\d+): loss [\d.]+, accuracy ([\d.]+) %$", re.MULTILINE)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "my-app"])
    assert done.exit_code == 0, done.output
    return tmp_path / "my-app"


@contextmanager
def imported(folder: Path) -> Iterator[Any]:
    """run.py of ``folder``, imported as ``python run.py`` imports it: its own files come before this project's apps."""
    names = ("my_app", "run")
    ours = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(ours)


def run(folder: Path) -> None:
    with imported(folder) as module:
        torch.manual_seed(0)
        run_in_process(module.config, **{name.replace("app", "_app"): place for name, place in module.components.items()})


def accuracies(output: str) -> list[float]:
    return [float(accuracy) for _, accuracy in ROUND.findall(output)]


@pytest.mark.slow
def test_it_runs_in_one_process_and_learns(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(demo)
    found = accuracies(capsys.readouterr().out)
    assert len(found) == 10
    assert found[0] < 50 < 65 < found[-1]  # control: one round is not enough


def test_a_client_that_answers_no_questions_ends_the_run(demo: Path) -> None:
    """Negative control: it is these files that run."""
    client = demo / "my_app/client_app.py"
    text = client.read_text()
    assert "\nanswer(" in text
    client.write_text(re.sub(r"^answer\(.*\n", "", text, flags=re.MULTILINE))
    with pytest.raises(RunFailed, match="to client_app.py"):
        run(demo)


def printed(output: str) -> str:
    """Return the command for Ray that ``fl-bn new`` has printed."""
    (command,) = re.findall(r"^ +(cd .*flwr run .*)$", output, re.MULTILINE)
    return str(command)


@pytest.mark.ray
@pytest.mark.pinned("tests/newest has the newest")
@pytest.mark.parametrize("of", ["wheel", "checkout"])
def test_the_printed_command_runs_as_it_is(of: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("installed") if of == "wheel" else ROOT
    env = os.environ | {"PYTHONPATH": str(path), "FLWR_HOME": str(tmp_path / "flwr"), "RAY_ADDRESS": "local"}  # no cluster of others
    made = subprocess.run(("fl-bn", "new", "my-app"), cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    done = subprocess.run(printed(made.stdout), shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert len(accuracies(done.stdout)) == 10, done.stdout + done.stderr


def test_it_is_named_and_complete(demo: Path) -> None:
    project = tomllib.loads((demo / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert (demo / "README.md").read_text().startswith("# my-app\n")
    files = [path for path in demo.rglob("*") if path.is_file()]
    package = {f"my_app/{name}.py" for name in ("__init__", "client_app", "server_app", "task")}
    assert {path.relative_to(demo).as_posix() for path in files} == {"pyproject.toml", "README.md", "run.py", *package}
    assert "$" not in "".join(path.read_text() for path in files)
    assert project["tool"]["flwr"]["federations"]["default"] == "my-app-simulation"


@pytest.mark.parametrize("name", ["torch", "fl-bn", "import"])
def test_a_name_whose_package_would_hide_another_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", name])
    assert done.exit_code == 2
    assert f"the app's package would be called {name.replace('-', '_')}" in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


def test_two_apps_have_no_module_in_common(demo: Path) -> None:
    """Later versions of Flower run all apps from one SuperLink, whose folder comes first on the path of Ray's processes."""
    assert CliRunner().invoke(app, ["new", "other"]).exit_code == 0
    modules = [{path.name for path in folder.iterdir() if (path / "__init__.py").exists()} for folder in (demo, demo.parent / "other")]
    assert modules == [{"my_app"}, {"other"}]


def test_run_py_still_works_when_flower_has_moved_the_federations(demo: Path) -> None:
    project = demo / "pyproject.toml"
    text = project.read_text()
    project.write_text(text[: text.index("[tool.flwr.federations]")])
    with imported(demo) as module:
        moved = tomllib.loads(text)["tool"]["flwr"]["federations"]["my-app-simulation"]
        assert module.config["clients"] == moved["options"]["num-supernodes"]


@pytest.mark.parametrize("name", ["../x", "a b", "1st", "", "a.b", "/x", "$x"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", name])
    assert done.exit_code == 2
    assert "expected a name of letters, digits, - and _ that begins with a letter" in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(demo: Path) -> None:
    (demo / "my_app/task.py").write_text("mine")
    done = CliRunner().invoke(app, ["new", "my-app"])
    assert done.exit_code == 2
    assert "my-app exists already" in " ".join(done.output.split())
    assert (demo / "my_app/task.py").read_text() == "mine"
