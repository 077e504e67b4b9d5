"""Find the git commit of this package's source, also without git, as in an image."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # fl_bn
COMMIT = "commit.toml"  # the package's file that holds the commit


def commit_of(folder: Path) -> str:
    """Return the abbreviated git commit of ``folder``, with ``+`` for changes; empty without git."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """Return the abbreviated git commit of this package's source, if known.

    It is read from commit.toml (``COMMIT``), which is part of images and of a run's
    code, or from the package's git checkout, with ``+`` if tracked files have
    changes.
    """
    file = PACKAGE / COMMIT
    return str(tomllib.loads(file.read_text()).get("commit", "")) if file.exists() else commit_of(PACKAGE)
