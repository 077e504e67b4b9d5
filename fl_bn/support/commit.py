"""Find the git commit of this package's source. The commit is also known without git, as in a container image or on a client's machine."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]  # fl_bn
COMMIT = "commit.toml"  # the package's file that holds the commit


def commit_of(folder: Path) -> str:
    """Return the abbreviated git commit of ``folder``, with ``+`` if tracked files have changes; empty outside a git checkout."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """Return the abbreviated git commit of this package's source. Empty if it is unknown.

    It is read from the file commit.toml (``COMMIT``), which is part of container images and is sent with a run's code.
    Without this file, it is the commit of the git checkout that holds the package, with ``+`` if tracked files have
    changes.
    """
    file = PACKAGE / COMMIT
    return str(tomllib.loads(file.read_text()).get("commit", "")) if file.exists() else commit_of(PACKAGE)
