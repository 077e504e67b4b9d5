"""Define ``fl-bn new``, which makes a Flower app from the files in ``fl_bn/templates/app``."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fl_bn.cli.refusal import refused
from fl_bn.support import durable

NAMED = ("pyproject.toml", "README.md")  # files into which the name of the app is written
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def new(name: Annotated[str, typer.Argument(help="the name of the app, and of the folder that is made for it here")]) -> None:
    """Make a Flower app of your own.

    The app has a network with BatchNorm, data that need no download, and a method,
    so it can be run at once.
    """
    folder = Path(name)
    try:
        write(name, folder)
    except (ValueError, OSError) as error:
        raise refused(error) from error
    typer.echo(f"{folder}: read README.md first, then change {package_of(name)}/task.py")
    typer.echo(f"  cd {name} && flwr run . --stream\n  cd {name} && python run.py    # without Ray")


def write(name: str, folder: Path) -> None:
    """Write the files of the new app ``name`` into the new ``folder``.

    Raises:
        ValueError: The name, or its package's, is not allowed, or that of another
            module.
        FileExistsError: The folder exists.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a name of letters, digits, - and _ that begins with a letter, but got {name!r}: try fl-bn new my-app")
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists already, and was not changed: choose another name, or remove {folder} first")
    package = package_of(name)
    if iskeyword(package) or find_spec(package) is not None:
        raise ValueError(f"the app's package would be called {package}, which is a keyword or another module: choose another name")
    template = files("fl_bn").joinpath("templates/app")
    for source, made in ((template, folder), (template / "package", folder / package)):
        for file in source.iterdir():
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                written = Template(text).substitute(name=name, package=package) if file.name in NAMED else text
                durable.write(made / file.name, written.encode(), mode=0o666)


def package_of(name: str) -> str:
    """Return the name of the app's package, its own, since apps may share an import path."""
    return name.replace("-", "_")
