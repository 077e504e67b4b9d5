"""Load your own CSV files, one per site, described by a columns.toml.

Cells are converted with constants of columns.toml alone, so a site's data do not
change another's numbers.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_bn.data.columns import DROP, FILE, FILL, REFUSE, ZEROS, Columns, Scale, is_missing, read_columns
from fl_bn.data.folder import visible
from fl_bn.data.record import DataError, DataNotFound, Dataset, domains_of, expect, paths
from fl_bn.support.names import nearest, short

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
LARGEST = float(np.finfo(np.float32).max)
_STREAM = 0xC57  # sets these draws apart from others that start from the same seed


@dataclass(frozen=True, eq=False)
class TableData(Dataset):
    """Hold rows of CSV files as ``x``, float32 (N, inputs)."""

    columns: Columns = Columns("")


@dataclass(frozen=True)
class Rows:
    """Hold the rows of one CSV file, as numbers.

    Attributes:
        x: inputs (N, inputs).
        y: labels or values (N,).
        groups: cells of the group column; empty without one.
        note: how many rows were used and left out, and cells replaced. Empty: all
            were used.
    """

    x: NDArray[np.float64]
    y: NDArray[np.generic]
    groups: tuple[str, ...]
    note: str


def load_csv(path: str, image_size: int) -> TableData:
    """Load the data set ``csv`` from CSV files. Each is a domain with the file's name.

    A file has a header line and a line per sample. ``columns.toml`` beside it names
    target and columns, in any order (``Columns``). ``split`` draws the same test
    rows in every run, by the seed in columns.toml.

    Args:
        path: a folder of ``*.csv``, or files, separated by commas.
        image_size: 0 or 1, as a row has no pixels.

    Raises:
        DataNotFound: there is no such file or folder, or no columns.toml.
        DataError: there is no path, two files have one name, an argument or
            columns.toml is wrong, or a file is refused: ``part`` says where.
    """
    expect(image_size in (0, 1), "csv", "image-size", "0 or 1, as rows have no pixels", image_size)
    files = csv_files(path)
    columns = _columns(files)
    tables = [read_rows(file, columns) for file in files]
    splits = [split(table, columns) for table in tables]
    x = np.concatenate([table.x for table in tables]).astype(np.float32)
    y = np.concatenate([table.y for table in tables]).astype(np.int64 if columns.classes else np.float32)
    test = np.concatenate(splits)
    for file, own in zip(files, splits, strict=True):
        expect(bool(own.any()), file, "", "at least a training row and a test row", f"{len(own)} rows, divided by {columns.group or 'row'}")
    owners = [f"{place} {group}" for place, table in enumerate(tables) for group in table.groups]  # a patient's number is a site's own
    groups = torch.from_numpy(np.unique(owners, return_inverse=True)[1][~test]) if columns.group else None
    (x_train, y_train), (x_test, y_test) = ((torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in (~test, test))
    return TableData(
        "csv",
        x_train,
        y_train,
        x_test,
        y_test,
        classes=len(columns.classes) or 1,
        columns=columns,
        group_train=groups,
        notes=tuple(f"{file.name}: {table.note}" for file, table in zip(files, tables, strict=True) if table.note),
        **domains_of(files, [int((~test).sum()) for test in splits], [int(test.sum()) for test in splits]),
    )


def csv_files(path: str) -> list[Path]:
    """List the CSV files that ``path`` names, a folder's by name.

    Raises:
        DataNotFound: a file does not exist, or a folder has no CSV file.
        DataError: there is no path.
    """
    expect(bool(paths(path)), "csv", "data-path", f"a folder with a .csv file per site and {FILE}, or files separated by commas", "none")
    for part in paths(path):
        if not part.exists() or not _inside(part):
            raise DataNotFound(f"csv: there is no .csv file {str(part)!r} in {Path.cwd()}")
    return listed(path)


def listed(path: str) -> list[Path]:
    """List the CSV files that ``path`` names, which may not exist."""
    return [file for part in paths(path) for file in _inside(part)]


def _inside(part: Path) -> list[Path]:
    return [file for file in visible(part) if file.suffix.lower() == ".csv"] if part.is_dir() else [part]


def _columns(files: Sequence[Path]) -> Columns:
    """Read the columns.toml that describes all files.

    Raises:
        DataError: files lie in several folders, whose columns.toml differ.
    """
    found = {folder: read_columns(folder) for folder in dict.fromkeys(file.parent for file in files)}
    first, columns = next(iter(found.items()))
    for folder, other in found.items():
        same = other.digest == columns.digest
        expect(same, folder / FILE, "", f"the content of {first / FILE}, so that all sites read equal cells as equal numbers", "another")
    return columns


def read_rows(file: Path, columns: Columns) -> Rows:
    """Read the rows of one CSV file.

    Raises:
        DataError: a cell, a line or the header is wrong, or there are no rows.
    """
    lines = list(read_lines(file, columns.delimiter))
    header = checked_header(file, *lines[0], columns)
    rows: list[tuple[list[float], float, str]] = []
    counts = Counter[str]()
    for line, cells in lines[1:]:
        expect(len(cells) == len(header), file, f"line {line}", f"{len(header)} cells, as the header has", len(cells))
        try:
            row, replaced = _row(file, line, dict(zip(header, cells, strict=True)), columns)
        except _LeftOut as error:
            counts[str(error)] += 1
        else:
            rows.append(row)
            counts.update(replaced)
    expect(bool(rows), file, "", "rows below the header", f"none: {len(lines) - 1} were left out" if lines[1:] else "none")
    note = f"{len(rows)} rows are used; {', '.join(f'{what}: {n}' for what, n in sorted(counts.items()))}" if counts else ""
    x, y, groups = zip(*rows, strict=True)
    return Rows(
        np.array(x, dtype=np.float64),
        np.array(y, dtype=np.int64 if columns.classes else np.float64),
        tuple(groups) if columns.group else (),
        note,
    )


class _LeftOut(Exception):
    """Say why a row is left out."""


def _row(file: Path, line: int, cells: Mapping[str, str], columns: Columns) -> tuple[tuple[list[float], float, str], list[str]]:
    """Convert a row to inputs, target and group, and list replaced cells."""
    replaced: list[str] = []

    def instead(name: str, policy: str, reason: str, what: str, wanted: str, found: str) -> None:
        if policy == DROP:
            raise _LeftOut(f"rows left out for {reason}")
        expect(policy in (FILL, ZEROS), file, place(line, name), wanted, found)
        replaced.append(what)

    def absent(name: str, *, fillable: bool = True) -> bool:
        if not is_missing(cells[name]):
            return False
        policy = columns.missing if fillable or columns.missing == DROP else REFUSE
        what, wanted = "missing cells read as the stated mean, or as no category", f"a value, or missing = 'drop' in {FILE}"
        instead(name, policy, "a missing value", what, wanted, short(cells[name]))
        return True

    x = [0.0 if absent(name) else number(file, line, name, cells[name], scale) for name, scale in columns.numeric.items()]
    for name, categories in columns.categorical.items():
        cell = cells[name]
        if cell not in categories and not absent(name):
            wanted, found = f"one of {short(', '.join(categories))}", f"{short(cell)}{nearest(cell, categories)}"
            instead(name, columns.unknown, "an unknown category", "unknown categories read as none", wanted, found)
        x += [float(cell == category) for category in categories]
    cell = cells[columns.target]
    if cell not in columns.classes:
        absent(columns.target, fillable=False)
        known = f"one of the classes {short(', '.join(columns.classes))}"
        expect(not columns.classes, file, place(line, columns.target), known, f"{short(cell)}{nearest(cell, columns.classes)}")
    y = columns.classes.index(cell) if columns.classes else number(file, line, columns.target, cell, columns.target_scale)
    if columns.group:
        absent(columns.group, fillable=False)
    return (x, y, cells.get(columns.group, "")), replaced


def read_lines(file: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each line that is not empty, the header first.

    Raises:
        DataError: the file is empty, cannot be read, or is no CSV file in UTF-8.
    """
    line, found = 1, False
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells) or (found and len(cells) > 1):  # else the line is empty
                    found = True
                    yield line, cells
                line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(file, f"expected cells between {delimiter!r}, but {error}: check the quotes", f"line {line}") from error
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(file, f"expected text in UTF-8, but could not read it: {error}") from error
    expect(found, file, "", "a header with the names of the columns", "an empty file")


def checked_header(file: Path, line: int, header: list[str], columns: Columns) -> list[str]:
    """Return the header of a file.

    Raises:
        DataError: it lacks a column of ``columns``, or has one twice or unlisted.
    """
    for name in columns.names:
        found = f"{short(', '.join(header))}{nearest(name, header)}"
        expect(name in header, file, place(line, name), f"this column of {FILE}, and cells between {columns.delimiter!r}", found)
    known = (*columns.names, *columns.ignore)
    for name in header:
        expect(header.count(name) == 1, file, place(line, name), "every column once", "this name more often")
        expect(name in known, file, place(line, name), f"a column that {FILE} lists", f"another{nearest(name, known)}")
    return header


def number(file: Path, line: int, column: str, cell: str, scale: Scale) -> float:
    """Convert a cell to a scaled number.

    Raises:
        DataError: it is none, or too large.
    """
    value = (float(cell) - scale.mean) / scale.std if NUMBER.fullmatch(cell) else math.nan
    expect(abs(value) <= LARGEST, file, place(line, column), "a finite number, like -12.5 or 3e4", short(cell))
    return value


def place(line: int, column: str) -> str:
    """Return the part of a CSV file for a ``DataError``."""
    return f"line {line}, column {column!r}"


def split(rows: Rows, columns: Columns) -> NDArray[np.bool_]:
    """Draw one file's test rows at random, as bool (N,).

    The test share is drawn from each class, or from all rows if the target is a
    number. A class of two or more rows has at least one row of each kind. If every
    class has one row, one row of the file is a test row. With a group column,
    groups are drawn instead. A file with one row, or one group, has no test row.
    """
    owners = np.array(rows.groups) if rows.groups else np.arange(len(rows.y))
    # A group may have rows of several classes, so groups are drawn without regard to classes.
    strata = rows.y if columns.classes and not rows.groups else np.zeros(len(rows.y), dtype=np.int64)
    test = np.zeros(len(rows.y), dtype=bool)
    for stratum in np.unique(strata):
        members = np.unique(owners[strata == stratum])
        rng = np.random.default_rng(np.random.SeedSequence([_STREAM, columns.seed, int(stratum)]))
        tested = min(max(1, round(columns.test_share * len(members))), len(members) - 1)
        test |= np.isin(owners, rng.permutation(members)[:tested])
    if not test.any() and len(rows.y) > 1 and not rows.groups:  # each class has one row
        test[np.random.default_rng(np.random.SeedSequence([_STREAM, columns.seed])).integers(len(rows.y))] = True
    return test
