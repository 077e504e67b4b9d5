"""Find the project that a server submits, and copy what Flower sends of it."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from fl_bn.support.commit import COMMIT, commit_of
from fl_bn_site.folders import FolderError, ServerFolder

SENT = {".py", ".toml", ".md"}  # by Flower, to the sites; all else stays
APART = ("pyvenv.cfg", "server/server.toml", "server.toml", "site.toml")  # a folder with one of these is an environment, or of a kit


def project_of(server: ServerFolder) -> Path:
    """Return the project that is submitted: server.toml's ``app``, else the one that this package is installed from.

    Raises:
        FolderError: This package is not installed from a project.
    """
    folder = server.app or Path(__file__).parents[1]
    if not (folder / "pyproject.toml").exists():
        raise FolderError(
            f"{folder} has no pyproject.toml, so there is no project to submit: give its folder as `app` in {server.path / server.file}, "
            "or install it with pip install -e"
        )
    return folder


@contextmanager
def stage(project: Path) -> Iterator[Path]:
    """Copy what Flower sends of a project.

    Flower writes beside the project, and would read all files of an environment in it. The copy lacks the
    folders and files that the project's pyproject.toml names under ``[tool.fl-bn] not-sent``. A copy of fl-bn
    itself says of which commit it is, since git does not travel.

    Args:
        project: The folder of the project.

    Yields:
        The folder of the copy, which is deleted at the end.

    Raises:
        FolderError: pyproject.toml cannot be read, ``not-sent`` is no list of texts, or a file cannot be
            copied.
    """
    file = project / "pyproject.toml"
    try:
        listed = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("fl-bn", {}).get("not-sent", [])
    except (OSError, ValueError) as error:
        raise FolderError(f"{file} cannot be read: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise FolderError(f"{file}: not-sent of [tool.fl-bn] must be a list of paths in quotes, but got {listed!r}")
    home = {project / name for name in listed}

    def others(folder: str, names: list[str]) -> list[str]:
        apart = {name for name in names if name.startswith(".") and name != ".gitignore"} | {"__pycache__"}
        apart |= {name for name in names if any(os.path.exists(os.path.join(folder, name, mark)) for mark in APART)}
        apart |= {name for name in names if Path(folder, name) in home}
        files = [name for name in names if os.path.isfile(os.path.join(folder, name)) and name != ".gitignore"]
        return [*apart, *(name for name in files if Path(name).suffix not in SENT)]

    with tempfile.TemporaryDirectory(prefix="fl-bn-") as folder:
        copy = Path(folder) / "app"
        try:
            shutil.copytree(project, copy, ignore=others, ignore_dangling_symlinks=True)
        except shutil.Error as error:
            raise FolderError("; ".join(f"{source} cannot be copied: {why}" for source, _, why in error.args[0][:3])) from error
        if (copy / "fl_bn").is_dir() and (commit := commit_of(project)):
            (copy / "fl_bn" / COMMIT).write_text(tomli_w.dumps({"commit": commit}))
        yield copy
