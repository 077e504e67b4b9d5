"""Build the wheel of this checkout with ``pip``, and install it into a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fl_bn", "fl_bn_site", "experiments", "tools", "tests", "server_app", "client_app")
SOURCES = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def copied(names: tuple[str, ...], folder: Path) -> Path:
    """Copy these files and folders of the checkout into a new ``folder``; return it."""
    folder.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(folder: Path) -> Path:
    """Build the wheel in ``folder``; return the file."""
    source = copied(SOURCES, folder / "source")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True, capture_output=True)
    (found,) = folder.glob("fl_bn-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True)
    return target
