"""The wheel of this checkout, as ``pip`` makes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("fl_bn", "fl_bn_site", "experiments", "tools", "tests", "server_app", "client_app")
SOURCES = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def copied(names: tuple[str, ...], folder: Path) -> Path:
    """A new ``folder`` with these files and folders of the checkout."""
    folder.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(folder: Path) -> Path:
    """The wheel, in ``folder``."""
    source = copied(SOURCES, folder / "source")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True, capture_output=True)
    (found,) = folder.glob("fl_bn-*.whl")
    return found
