"""``fl-bn new``: what it writes runs as it is, in one process and on Ray; and it writes over nothing."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_bn.cli.main import app
from fl_bn.flower import RunFailed
from tests.examples.flower_apps import imported
from tests.listed import listed
from tests.refusals import naming

ROUND = re.compile(r"^round (\d+): loss [\d.]+, accuracy ([\d.]+) %$", re.MULTILINE)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Path]:
    with chdir(tmp_path):
        done = CliRunner().invoke(app, ["new", "my-app"])
        assert done.exit_code == 0, done.output
        yield tmp_path / "my-app"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run run.py as ``python run.py`` does, with a seed."""
    seeded = "import runpy, torch; torch.manual_seed(0); runpy.run_path('run.py', run_name='__main__')"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", seeded], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def accuracies(output: str) -> list[float]:
    return [float(accuracy) for _, accuracy in ROUND.findall(output)]


@pytest.mark.slow
def test_it_runs_in_one_process_and_learns(demo: Path) -> None:
    done = run(demo)
    found = accuracies(done.stdout)
    assert len(found) == 10, done.stderr
    assert found[0] < 50 < 65 < found[-1]  # control: one round is not enough


def test_a_client_that_answers_no_questions_ends_the_run(demo: Path) -> None:
    """Negative control: it is these files that run."""
    client = demo / "my_app/client_app.py"
    text = client.read_text()
    assert "\nanswer(" in text
    client.write_text(re.sub(r"^answer\(.*\n", "", text, flags=re.MULTILINE))
    with imported(demo), naming("to client_app.py", RunFailed):
        runpy.run_path(str(demo / "run.py"), run_name="__main__")


def test_a_client_with_fewer_samples_than_a_batch_trains_on_all(demo: Path) -> None:
    with imported(demo):
        train, _ = importlib.import_module("my_app.task").load_data(0, 150, 32)
    assert [len(labels) for _, labels in train] == [len(train.dataset)]


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


def test_it_is_named_and_complete_and_shares_no_module_with_another(demo: Path) -> None:
    """Later versions of Flower run all apps from one SuperLink, whose folder comes first on the path of Ray's processes."""
    project = tomllib.loads((demo / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert project["tool"]["flwr"]["federations"]["default"] == "my-app-simulation"
    assert (demo / "README.md").read_text().startswith("# my-app\n")
    files = [path for path in demo.rglob("*") if path.is_file()]
    assert "$" not in "".join(path.read_text() for path in files)
    assert CliRunner().invoke(app, ["new", "other"]).exit_code == 0
    modules = [{path.name for path in folder.iterdir() if (path / "__init__.py").exists()} for folder in (demo, demo.parent / "other")]
    assert modules == [{"my_app"}, {"other"}]


@listed(
    ("name", "word"),
    [
        *[(name, "the app's package would be called") for name in ("torch", "import")],  # it would hide another one
        *[(name, "a name of letters, digits, - and _ that begins with a letter") for name in ("../x", "a b", "1st", "", "/x")],
        ("my-app", "my-app exists already"),
    ],
)
def test_a_name_that_is_none_or_is_taken_is_refused(name: str, word: str, demo: Path) -> None:
    (demo / "my_app/task.py").write_text("mine")
    done = CliRunner().invoke(app, ["new", name])
    assert done.exit_code == 2
    assert word in " ".join(done.output.split())
    assert [path.name for path in demo.parent.iterdir()] == ["my-app"]
    assert (demo / "my_app/task.py").read_text() == "mine"
