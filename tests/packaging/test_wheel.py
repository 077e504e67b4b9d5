"""What people install: the wheel, in a folder of its own, with no checkout in sight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fl_bn", "fl_bn_site", "experiments", "tools", "tests", "server_app", "client_app")
SOURCES = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")
pytestmark = pytest.mark.slow


def tops(names: Iterable[str]) -> set[str]:
    """The packages and modules that a wheel with these files puts on the path."""
    return {name.partition("/")[0] for name in names if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (source := folder / "source").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def fl_bn(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as pip has put it there. Its folder is the first on the path, and the checkout is not on it."""
    return python(installed, folder, str(installed / "bin" / "fl-bn"), *arguments)


def python(installed: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_it_holds_two_packages(wheel: Path) -> None:
    """The library and the operator's part; this repository's own tools stay here."""
    names = zipfile.ZipFile(wheel).namelist()
    assert tops(names) == {"fl_bn", "fl_bn_site"}
    assert {
        "fl_bn/py.typed",
        "fl_bn/advise/map.json",
        "fl_bn/templates/app/task.py",
        "fl_bn/apps/server.py",
        "fl_bn_site/supervisor.py",
    } <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    assert tops([*names, "experiments/cli.py"]) == {"fl_bn", "fl_bn_site", "experiments"}  # control


def test_what_runs_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-c", "import fl_bn, sys; print(fl_bn.__file__, *sys.path, sep=chr(10))")
    file, *path = done.stdout.splitlines()
    assert file == str(installed / "fl_bn" / "__init__.py")
    assert str(ROOT) not in path


def test_the_command_answers(installed: Path, tmp_path: Path) -> None:
    done = fl_bn(installed, tmp_path, "--help")
    assert (done.returncode, "sweep" in done.stdout, "kit" in done.stdout) == (0, True, True), done.stderr
    assert "experiments" not in done.stdout, "a tool of the repository"
    assert fl_bn(installed, tmp_path, "experiments", "list").returncode == 2  # control


def test_a_run_in_process_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    done = fl_bn(installed, tmp_path, "run", "--run-config", "rounds=1 clients=2 model='mlp' local-steps=1 name='first' workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/first/model.safetensors").is_file()


def test_a_new_app_runs_on_it(installed: Path, tmp_path: Path) -> None:
    done = fl_bn(installed, tmp_path, "new", "demo")
    assert done.returncode == 0, done.stderr
    done = python(installed, tmp_path / "demo", "run.py")
    assert done.returncode == 0, done.stderr
    assert "round 10: loss" in done.stdout
