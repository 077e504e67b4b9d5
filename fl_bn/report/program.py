"""Read the pictures and tables that a program other than a sweep has written to a folder, for its page."""

from __future__ import annotations

import base64
import csv
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fl_bn.run.config import ConfigError

FILE = "program.toml"  # the experiment's file, as it was run
ROWS = 60  # of a table that are shown


@dataclass(frozen=True)
class TableStart:
    """Hold the beginning of a CSV file.

    Attributes:
        name: The file's name.
        columns: The names of its columns.
        rows: The first rows.
        count: How many rows the file has.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    count: int


@dataclass(frozen=True)
class Program:
    """Hold what a page shows of a program's folder.

    Attributes:
        id: Keeps apart the programs of one page.
        title: The experiment's title.
        notes: The comments of the experiment's file.
        pictures: Of each: its name, the PNG as base64, and the width in pixels below which nobody can read it.
        tables: The CSV files.
        text: The experiment's file.
    """

    id: str
    title: str
    notes: str
    pictures: tuple[tuple[str, str, int], ...]
    tables: tuple[TableStart, ...]
    text: str


def read_program(folder: Path, id: str = "") -> Program:
    """Read the results of a program. Raises ConfigError where the folder is no program's."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        title = str(tomllib.loads(text)["title"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} is no experiment's folder: {error}") from error
    notes = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    pictures = tuple(_picture(file) for file in sorted(folder.glob("*.png")))
    return Program(id, title, notes, pictures, tuple(_table_start(file) for file in sorted(folder.glob("*.csv"))), text)


def _picture(file: Path) -> tuple[str, str, int]:
    png = file.read_bytes()
    width = int.from_bytes(png[16:20])  # of the header
    return file.stem.replace("_", " "), base64.b64encode(png).decode(), width // 3


def _table_start(file: Path) -> TableStart:
    with file.open(newline="", encoding="utf-8") as source:
        columns, *rows = [tuple(_short(value) for value in row) for row in csv.reader(source)] or [()]
    return TableStart(file.name, columns, tuple(rows[:ROWS]), len(rows))


def _short(value: str) -> str:
    """Round a number to four digits, which are enough to look at: the file has all of them."""
    try:
        return f"{float(value):.4g}" if "." in value or "e" in value else value
    except ValueError:
        return value
