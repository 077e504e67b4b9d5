"""``fl-bn new``: a Flower app of one's own, from the files in ``fl_bn/templates/app``."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fl_bn.cli.refusal import refused

NAMED = ("pyproject.toml", "README.md")  # the files that have the app's name in them
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def new(name: Annotated[str, typer.Argument(help="of the app, and of the folder that is made here")]) -> None:
    """Writes a Flower app of your own: a network with BatchNorm, data that need no download, and a method. It runs as it is."""
    folder = Path(name)
    try:
        write(name, folder)
    except (ValueError, OSError) as error:
        raise refused(error) from error
    typer.echo(f"{folder}: read README.md first, then change task.py")
    typer.echo(f"  cd {name} && flwr run .\n  cd {name} && python run.py    # without Ray")


def write(name: str, folder: Path) -> None:
    """Make ``folder`` with the app ``name``.

    Raises:
        ValueError: the name cannot be an app's.
        FileExistsError: the folder is there.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a name of letters, digits, - and _ that begins with a letter, but got {name!r}: try fl-bn new my-app")
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} is there already, and nothing in it is changed: choose another name, or remove it first")
    folder.mkdir()
    for source in files("fl_bn").joinpath("templates/app").iterdir():
        if source.is_file():
            text = source.read_text(encoding="utf-8")
            (folder / source.name).write_text(Template(text).substitute(name=name) if source.name in NAMED else text, encoding="utf-8")
