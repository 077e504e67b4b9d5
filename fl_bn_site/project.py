"""Find the project that a server submits as an app, and copy the files that Flower sends to the sites."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from fl_bn.flower.compat import find
from fl_bn.support.commit import COMMIT, commit_of
from fl_bn_site.folders import FolderError, ServerFolder

SENT = {".py", ".toml", ".md"}  # the kinds of files that Flower sends
APART = ("pyvenv.cfg", "server/server.toml", "server.toml", "site.toml")  # files that only an environment or a folder of a kit has


def project_of(server: ServerFolder) -> Path:
    """Return the folder of the project that ``server`` submits.

    It is the one at ``app`` in server.toml, or else the one from which this package is installed (editable).

    Raises:
        FolderError: The folder has no pyproject.toml.
    """
    folder = server.app or Path(__file__).parents[1]
    if not (folder / "pyproject.toml").exists():
        raise FolderError(
            f"{folder} has no pyproject.toml, so it is not a project that can be submitted: write the folder of the project at `app` in "
            f"{server.path / server.file}, or install fl-bn from its project by pip install -e"
        )
    return folder


def build(server: ServerFolder) -> bytes:
    """Pack the project that ``server`` submits, as the package that every site receives.

    The same files make the same bytes.

    Raises:
        FolderError: A file of the project is wrong, or the package is too large for Flower.
    """
    project = project_of(server)
    with stage(project) as app:
        try:
            package: bytes = find("build_fab_from_disk")(app)
        except ValueError as error:
            raise FolderError(f"{project} cannot be packed: {error}") from error
    return package


@contextmanager
def stage(project: Path) -> Iterator[Path]:
    """Copy the files of a project that Flower sends, into a temporary folder.

    A copy is submitted in place of the project, because Flower writes files beside the project, and reads
    every file in it, also those of a virtual environment. The copy lacks environments, folders of a kit, hidden
    files, and the paths at ``[tool.fl-bn] not-sent`` in the project's pyproject.toml. A copy of fl-bn itself
    has a file with its commit, since the copy has no git repository.

    Args:
        project: The folder of the project.

    Yields:
        The folder of the copy. It is deleted when the ``with`` block ends.

    Raises:
        FolderError: pyproject.toml cannot be read, ``not-sent`` is not a list of texts, or a file cannot be
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
