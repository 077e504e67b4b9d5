"""What people install: the wheel, in a folder of its own, with no checkout in sight."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_architecture import PROJECT, distributions

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def fl_bn(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as pip has put it there. Its folder is the first on the path, and the checkout is not on it."""
    return python(installed, folder, str(installed / "bin" / "fl-bn"), *arguments)


def python(installed: Path, folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_it_holds_two_houses_and_every_file_of_theirs_and_requires_what_the_project_says(wheel: Path) -> None:
    """The library and the operator's product are in it; the repository's tool, its evidence and the apps of the checkout are not."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"fl_bn", "fl_bn_site"}
    files = [path for house in ("fl_bn", "fl_bn_site") for path in (ROOT / house).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(ROOT).as_posix() for path in files} - set(names) == set()
    assert {"fl_bn/py.typed", "fl_bn/app/report/templates/report.html", "fl_bn_site/kit_files/site.md"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    needed = [line.partition(": ")[2] for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist: ")]
    plain = [re.split(r"[<>=! ]", one)[0] for one in needed if "extra ==" not in one]
    assert sorted(plain) == sorted(distributions(PROJECT["dependencies"]))


def test_what_runs_is_the_wheel_which_makes_kits_and_runs_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-c", "import fl_bn, sys; print(fl_bn.__file__, *sys.path, sep=chr(10))")
    file, *path = done.stdout.splitlines()
    assert file == str(installed / "fl_bn" / "__init__.py")
    assert str(ROOT) not in path
    assert fl_bn(installed, tmp_path, "experiments").returncode == 2  # control
    made = fl_bn(installed, tmp_path, "kit", "create", "--superlink", "127.0.0.1", "--sites", "A,B")
    verified = fl_bn(installed, tmp_path, "kit", "verify", "kit")
    ran = fl_bn(installed, tmp_path, "run", "--run-config", "rounds=1 clients=2 model='mlp' local-steps=1 name='first' workers=2")
    assert [done.returncode for done in (made, verified, ran)] == [0, 0, 0], made.stderr + verified.stdout + ran.stderr
    assert "# Site A" in (tmp_path / "kit/sites/A/GUIDE.md").read_text()
    assert (tmp_path / "runs/first/model.safetensors").is_file()
