"""Read the results of an experiment that is a program, and not a sweep: the pictures and tables in its folder."""

from __future__ import annotations

import base64
import csv
import tomllib
from dataclasses import dataclass
from pathlib import Path

from fl_bn.run.config import ConfigError

FILE = "program.toml"  # a copy of the experiment's file, as it was run
ROWS = 60  # the most rows of a table that the page shows


@dataclass(frozen=True)
class TableStart:
    """Hold the beginning of a CSV file.

    Attributes:
        name: The name of the file.
        columns: The names of the columns.
        rows: The first rows.
        count: How many rows the file has.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    count: int


@dataclass(frozen=True)
class Program:
    """Hold the results of a program, as its page shows them.

    Attributes:
        id: A prefix that makes the ids of this program unique on a page.
        title: The title of the experiment.
        notes: The comments in the experiment's file.
        pictures: For each picture, its name, the PNG file in base64, and the smallest readable width in pixels.
        tables: The first rows of the CSV files.
        text: The text of the experiment's file.
    """

    id: str
    title: str
    notes: str
    pictures: tuple[tuple[str, str, int], ...]
    tables: tuple[TableStart, ...]
    text: str


def read_program(folder: Path, id: str = "") -> Program:
    """Read the results of a program from its folder.

    Raises:
        ConfigError: The folder has no ``program.toml`` with a title, so it is not the folder of a program.
    """
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of an experiment, since {FILE} is missing or wrong: {error}") from error
    if "title" not in values:
        raise ConfigError(f"{folder} is not the folder of an experiment, since {FILE} has no key 'title'")
    notes = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    pictures = tuple(_picture(file) for file in sorted(folder.glob("*.png")))
    return Program(id, str(values["title"]), notes, pictures, tuple(_table_start(file) for file in sorted(folder.glob("*.csv"))), text)


def _picture(file: Path) -> tuple[str, str, int]:
    png = file.read_bytes()
    width = int.from_bytes(png[16:20])  # the width in the header of a PNG file
    return file.stem.replace("_", " "), base64.b64encode(png).decode(), width // 3


def _table_start(file: Path) -> TableStart:
    with file.open(newline="", encoding="utf-8") as source:
        columns, *rows = [tuple(_short(value) for value in row) for row in csv.reader(source)] or [()]
    return TableStart(file.name, columns, tuple(rows[:ROWS]), len(rows))


def _short(value: str) -> str:
    """Round a number to four digits for the page. Other texts are returned unchanged."""
    try:
        return f"{float(value):.4g}" if "." in value or "e" in value else value
    except ValueError:
        return value
