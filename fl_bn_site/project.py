"""Find the project that a server submits as an app, and copy the files that Flower sends to the sites."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from fl_bn.support.commit import COMMIT, commit_of
from fl_bn.support.flower_config import Scalar
from fl_bn_site.commands import environment, program
from fl_bn_site.folders import FolderError, ServerFolder
from fl_bn_site.signing import KEY

PYPROJECT = "pyproject.toml"
OF_RUN: dict[str, Scalar] = dict.fromkeys(("name", "client-nodes", "client-names", KEY, "output"), "")
"""Keys that fl-bn fills in for every run of a user's own app, with their empty values."""
SENT = {".py", ".toml", ".md"}  # the kinds of files that Flower sends
APART = ("pyvenv.cfg", "server/server.toml", "server.toml", "site.toml")  # files that only an environment or a folder of a kit has


def project_of(server: ServerFolder) -> Path:
    """Return the folder of the project that ``server`` submits.

    server.toml names this folder at ``app``. Without that line, it is the folder of fl-bn's editable installation.

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


def build(server: ServerFolder, own: Path | None = None) -> bytes:
    """Pack the app that ``server`` submits into a package (Flower's FAB archive). Equal files make equal bytes.

    Args:
        server: The server's folder.
        own: The folder of a user's own Flower app, which replaces fl-bn's app. Or a folder with modules (a network, a
            loader, a loss), which are packed beside fl-bn's app. None: fl-bn's app alone.

    Returns:
        The bytes of the package, as every site receives them.

    Raises:
        FolderError: ``own`` is no folder, a file of the project is wrong, or the package is too large for Flower.
    """
    if own is not None and not own.is_dir():
        raise FolderError(f"there is no folder {own}: --app needs the folder of a Flower app or of modules")
    is_app = own is not None and (own / PYPROJECT).exists()
    project = own if own is not None and is_app else project_of(server)
    with stage(project) as app:
        if own is not None:
            _complete(app) if is_app else _add_modules(own, app)
        packed = app.with_name("packed")
        packed.mkdir()
        argv = [program("flwr"), "build", "--app", str(app)]
        done = subprocess.run(argv, cwd=packed, env=environment({}), capture_output=True, text=True, check=False)
        if done.returncode:
            raise FolderError(f"{project} cannot be packed: {' '.join((done.stdout + done.stderr).split())[-500:]}")
        (package,) = packed.iterdir()
        return package.read_bytes()


def _complete(app: Path) -> None:
    """Add the run-config keys in ``OF_RUN``, such as ``name``, to the copy of a Flower app that lacks them.

    fl-bn sets these keys when it submits the run, and finds the run by them later. Flower refuses keys that an app lacks.

    Args:
        app: The folder of the copy.
    """
    file = app / PYPROJECT
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    flower = values.setdefault("tool", {}).setdefault("flwr", {}).setdefault("app", {})
    config = flower.get("config", {})
    if taken := [key for key in OF_RUN if config.get(key)]:
        raise FolderError(f"{file}: `fl-bn submit` sets the run-config key {taken[0]}: give the app's own key another name")
    flower["config"] = OF_RUN | config
    file.write_text(tomli_w.dumps(values), encoding="utf-8")


def _add_modules(source: Path, app: Path) -> None:
    """Copy the modules of a folder beside those of an app, so that a run config may name their functions.

    Raises:
        FolderError: The folder has no module, or the app already has a module of the same name.
    """
    with stage(source) as copy:
        entries = sorted(entry for entry in copy.iterdir() if entry.suffix == ".py" or entry.is_dir() and next(entry.rglob("*.py"), None))
        if not entries:
            raise FolderError(
                f"{source} has neither {PYPROJECT} nor a module: expected a Flower app, or modules, such as one with a network"
            )
        for entry in entries:
            target = app / entry.name
            if target.exists() or (app / entry.stem).exists() or target.with_suffix(".py").exists():
                raise FolderError(f"{source / entry.name}: fl-bn's own project has {entry.stem}, too, so give this module another name")
            shutil.move(entry, target)


@contextmanager
def stage(project: Path) -> Iterator[Path]:
    """Copy those files of a project that Flower sends into a temporary folder.

    The copy is submitted in place of the project, for two reasons. Flower writes files beside the project that it submits. And
    it reads every file in the project, even those of a virtual environment. The copy lacks virtual environments, folders of a
    kit, hidden files, and the paths at ``[tool.fl-bn] not-sent`` in the project's pyproject.toml. A copy of fl-bn itself has a
    file with the number of its commit, since it has no git repository.

    Args:
        project: The folder of the project.

    Yields:
        The folder of the copy. It is deleted when the ``with`` block ends.

    Raises:
        FolderError: pyproject.toml cannot be read, ``not-sent`` is not a list of texts, or a file cannot be
            copied.
    """
    file = project / PYPROJECT
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        listed = tomllib.loads(text).get("tool", {}).get("fl-bn", {}).get("not-sent", [])
    except (OSError, ValueError) as error:
        raise FolderError(f"{file} cannot be read: {error}. Correct the file") from error
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
