"""Load data of your own: CSV files, one per site, whose columns a columns.toml describes.

Every cell is converted with constants of columns.toml alone. Means, deviations and categories are never taken
from the data, so the data of one site do not change the numbers of another.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_bn.data.columns import DROP, FILE, FILL, REFUSE, ZEROS, Columns, Scale, is_missing, read_columns
from fl_bn.data.folder import visible
from fl_bn.data.function import Measurements
from fl_bn.data.record import DataNotFound, domains_of, paths
from fl_bn.support.names import nearest, short

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
LARGEST = float(np.finfo(np.float32).max)
_STREAM = 0xC57  # sets these draws apart from others that start from the same seed


class TableError(ValueError):
    """Report that a CSV file is refused.

    Attributes:
        file: path of the file.
        line: number of the line in the file, from 1; 0 if the error is about the whole file.
        column: name of the column; empty if the error is about a whole line.
        problem: what was expected, what is there, and what to do.
    """

    def __init__(self, file: Path, problem: str, line: int = 0, column: str = "") -> None:
        self.file, self.line, self.column, self.problem = file, line, column, problem
        where = "".join((f", line {line}" if line else "", f", column {column!r}" if column else ""))
        super().__init__(f"{file}{where}: {problem}")

    def __reduce__(self) -> tuple[type[TableError], tuple[Path, str, int, str]]:
        return TableError, (self.file, self.problem, self.line, self.column)


@dataclass(frozen=True, eq=False)
class TableData(Measurements):
    """Hold rows of CSV files as measurements: ``x`` is float32 (N, inputs).

    Attributes:
        columns: the description of the columns.
        notes: a sentence for each file in which rows were left out, or missing or unknown cells were replaced.
    """

    columns: Columns = Columns("")
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Hold the rows of one CSV file, as numbers.

    Attributes:
        file: path of the file.
        x: inputs (N, inputs).
        y: labels or values (N,).
        groups: cells of the group column; empty if there is no such column.
        counts: for each reason, how many rows were left out, or how many missing or unknown cells were replaced.
    """

    file: Path
    x: NDArray[np.float32]
    y: NDArray[np.generic]
    groups: tuple[str, ...]
    counts: Counter[str]

    @property
    def note(self) -> str:
        """Return a sentence with the numbers of rows used, rows left out and cells replaced.

        Empty: no row was left out, and no cell was replaced.
        """
        parts = ", ".join(f"{what}: {count}" for what, count in sorted(self.counts.items()))
        return f"{self.file.name}: {len(self.y)} rows are used; {parts}" if parts else ""


def load_csv(path: str, image_size: int) -> TableData:
    """Load the data set ``csv`` from one CSV file, or from several files, each of which is a domain with the file's name.

    A file has a header line and a line per sample. ``columns.toml`` beside the file names the target and all columns
    (``Columns``). The order of columns in a file does not matter. The function ``split`` draws the test rows of each file
    by the seed of columns.toml. So a site has the same test rows in every run, wherever its file lies.

    Args:
        path: a folder of ``*.csv``, or files, separated by commas.
        image_size: 0 or 1, as a row has no pixels.

    Raises:
        DataNotFound: there is no such file or folder, or no columns.toml.
        ValueError: there is no path, two files have the same name, columns.toml is wrong, or ``image_size`` is neither 0 nor 1.
        TableError: a file is refused. The message has the file, the line, the column, and what to do.
    """
    if image_size not in (0, 1):
        raise ValueError(f"dataset 'csv' has rows and no images, so image-size must be 0 or 1, but is {image_size}")
    files = csv_files(path)
    columns = _columns(files)
    tables = [read_rows(file, columns) for file in files]
    splits = [split(table, columns) for table in tables]
    x, y = np.concatenate([table.x for table in tables]), np.concatenate([table.y for table in tables])
    test = np.concatenate(splits)
    if not test.any():
        alike = f", and each file has only one {columns.group!r}" if columns.group and len(tables[0].y) > 1 else ""
        raise TableError(files[0], f"expected a training row and a test row at least, but there {_rows(len(y))} in all{alike}: add rows")
    parts = [torch.from_numpy(chosen) for chosen in (~test, test)]
    (x_train, y_train), (x_test, y_test) = ((torch.from_numpy(x)[part], torch.from_numpy(y)[part]) for part in parts)
    return TableData(
        "csv",
        x_train,
        y_train,
        x_test,
        y_test,
        classes=len(columns.classes) or 1,
        columns=columns,
        notes=tuple(table.note for table in tables if table.note),
        **domains_of(files, [int((~test).sum()) for test in splits], [int(test.sum()) for test in splits]),
    )


def csv_files(path: str) -> list[Path]:
    """List the CSV files that ``path`` names. The files of a folder are in the order of their names.

    Raises:
        DataNotFound: a file does not exist, or a folder has no CSV file.
        ValueError: there is no path, or two files have the same name.
    """
    named = paths(path)
    if not named:
        raise ValueError(f"dataset 'csv' needs data-path: a folder with a .csv file per site and {FILE}, or files separated by commas")
    for part in named:
        if not part.exists():
            raise DataNotFound(
                f"dataset 'csv': there is no {str(part)!r} (a relative path starts at the current folder, {str(Path.cwd())!r})"
            )
        if not _inside(part):
            raise DataNotFound(f"dataset 'csv': the folder {str(part)!r} has no .csv file: put one file per site there")
    files = listed(path)
    if len({file.stem for file in files}) < len(files):
        raise ValueError(f"a site has the name of its file, so names must differ, but got {', '.join(map(str, files))}: rename one")
    return files


def listed(path: str) -> list[Path]:
    """List the CSV files that ``path`` names, without a look at whether they exist."""
    return [file for part in paths(path) for file in _inside(part)]


def _inside(part: Path) -> list[Path]:
    return [file for file in visible(part) if file.suffix.lower() == ".csv"] if part.is_dir() else [part]


def _columns(files: Sequence[Path]) -> Columns:
    """Read the columns.toml that describes all files.

    Raises:
        ValueError: the files lie in several folders, and their columns.toml differ.
    """
    found = {folder: read_columns(folder) for folder in dict.fromkeys(file.parent for file in files)}
    first, columns = next(iter(found.items()))
    for folder, other in found.items():
        if other.digest != columns.digest:
            raise ValueError(
                f"{folder / FILE} differs from {first / FILE}, so equal cells would become different numbers: give all sites one {FILE}"
            )
    return columns


def read_rows(file: Path, columns: Columns) -> Rows:
    """Read the rows of one CSV file.

    Raises:
        TableError: the file is empty or not CSV, a column is missing or not described, a cell cannot be read, or no row is
            left.
    """
    inputs: list[NDArray[np.float32]] = []
    targets: list[float] = []
    groups: list[str] = []
    counts: Counter[str] = Counter()
    reader = _Cells(file, columns, counts)
    for line, cells in _lines(file, columns):
        row = reader.row(line, cells)
        if row is None:
            continue
        inputs.append(row[0])
        targets.append(row[1])
        groups.append(cells.get(columns.group, ""))
    if not inputs:
        dropped = f": all {sum(counts.values())} were left out" if counts else ""
        raise TableError(file, f"expected rows below the header, but there are none{dropped}: add rows, or remove the file")
    y = np.array(targets, dtype=np.int64 if columns.classes else np.float32)
    return Rows(file, np.stack(inputs), y, tuple(groups) if columns.group else (), counts)


def _lines(file: Path, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield, for each line below the header, its line number in the file (from 1), and column -> cell. Empty lines are skipped."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, delimiter=columns.delimiter, strict=True)
            line, header = 1, list[str]()
            while True:
                try:
                    cells = next(reader, None)
                except csv.Error as error:
                    raise TableError(file, f"expected cells between {columns.delimiter!r}, but {error}: check the quotes", line) from error
                if cells is None:
                    break
                stripped = [cell.strip() for cell in cells]
                if any(stripped) and not header:
                    header = _checked_header(file, line, stripped, columns)
                elif any(stripped) or len(stripped) > 1:  # else the line is empty
                    if len(stripped) != len(header):
                        found = f"expected {len(header)} cells, as the header has, but there are {len(stripped)}"
                        raise TableError(file, f"{found}: correct the line, or put cells with a {columns.delimiter!r} in quotes", line)
                    yield line, dict(zip(header, stripped, strict=True))
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise TableError(file, f"expected text in UTF-8, but {error.reason} at byte {error.start}: save the file as UTF-8") from error
    except OSError as error:
        raise TableError(file, f"expected a file that can be read, but {error.strerror}") from error
    if not header:
        raise TableError(file, "expected a header with the names of the columns, but the file is empty")


def _checked_header(file: Path, line: int, header: list[str], columns: Columns) -> list[str]:
    if twice := [name for name in header if header.count(name) > 1]:
        raise TableError(file, "expected every column once, but this name occurs more often: rename one", line, twice[0])
    known = (*columns.names, *columns.ignore)
    if absent := [name for name in columns.names if name not in header]:
        other = next((f"; it looks as if cells were separated by {mark!r}: set delimiter in {FILE}" for mark in (";", "\t", "|", ",")
                      if mark != columns.delimiter and len(header) == 1 and mark in header[0]), "")  # fmt: skip
        have = f"the file has {short(', '.join(header))}{nearest(absent[0], header)}"
        raise TableError(file, f"{FILE} lists this column, but {have}{other}", line, absent[0])
    if strange := [name for name in header if name not in known]:
        raise TableError(
            file,
            f"{FILE} does not list this column{nearest(strange[0], known)}; list it there, in ignore, [numeric] or [categorical]",
            line,
            strange[0],
        )
    return header


class _Leave(Exception):
    """Signal that a row of a CSV file is left out. The message is the reason."""


@dataclass(frozen=True)
class _Cells:
    """Convert the cells of one file's rows to numbers, and count the rows left out and the cells replaced."""

    file: Path
    columns: Columns
    counts: Counter[str]

    def row(self, line: int, cells: dict[str, str]) -> tuple[NDArray[np.float32], float] | None:
        """Return the inputs (inputs,) and the target of a row; None if the row is left out."""
        before = self.counts.copy()
        try:
            values = [self._number(line, name, cells[name], scale) for name, scale in self.columns.numeric.items()]
            for name, categories in self.columns.categorical.items():
                values += self._indicators(line, name, cells[name], categories)
            target = self._target(line, cells[self.columns.target])
            if self.columns.group and is_missing(cells[self.columns.group]):
                self._missing(line, self.columns.group, cells[self.columns.group], fillable=False)
        except _Leave as reason:
            self.counts.clear()  # cells of a row that is left out do not count
            self.counts.update(before)
            self.counts[str(reason)] += 1
            return None
        return np.array(values, dtype=np.float32), target

    def _number(self, line: int, name: str, cell: str, scale: Scale) -> float:
        if is_missing(cell):
            self._missing(line, name, cell)
            return 0.0  # the column's mean, as columns.toml states it
        return self._scaled(line, name, cell, scale)

    def _scaled(self, line: int, name: str, cell: str, scale: Scale) -> float:
        value = (float(cell) - scale.mean) / scale.std if NUMBER.fullmatch(cell) else np.nan
        if not abs(value) <= LARGEST:
            raise TableError(self.file, f"expected a finite number, like -12.5 or 3e4, but got {short(cell)}: correct the cell", line, name)
        return value

    def _indicators(self, line: int, name: str, cell: str, categories: tuple[str, ...]) -> list[float]:
        if cell not in categories:
            if is_missing(cell):
                self._missing(line, name, cell)
            else:
                self._unknown(line, name, cell, categories)
        return [float(cell == category) for category in categories]

    def _target(self, line: int, cell: str) -> float:
        name, classes = self.columns.target, self.columns.classes
        if cell in classes:
            return classes.index(cell)
        if is_missing(cell):
            self._missing(line, name, cell, fillable=False)
        if not classes:
            return self._scaled(line, name, cell, self.columns.target_scale)
        problem = f"expected one of the classes {short(', '.join(classes))}, but got {short(cell)}"
        raise TableError(self.file, f"{problem}{nearest(cell, classes)}: correct the cell, or list the class in {FILE}", line, name)

    def _missing(self, line: int, name: str, cell: str, fillable: bool = True) -> None:
        if self.columns.missing == DROP:
            raise _Leave("rows left out for a missing value")
        if self.columns.missing == FILL and fillable:
            self.counts["missing cells read as the stated mean, or as no category"] += 1
            return
        also = f", or 'fill' in {FILE}" if self.columns.missing == REFUSE and fillable else f" in {FILE}"
        what = f"the cell has no value ({short(cell)}){'' if fillable else ', and cells of this column are not filled in'}"
        raise TableError(self.file, f"{what}: give a value, or set missing to 'drop'{also}", line, name)

    def _unknown(self, line: int, name: str, cell: str, categories: tuple[str, ...]) -> None:
        if self.columns.unknown == DROP:
            raise _Leave("rows left out for an unknown category")
        if self.columns.unknown == ZEROS:
            self.counts["unknown categories read as none"] += 1
            return
        problem = f"expected one of {short(', '.join(categories))}, but got {short(cell)}{nearest(cell, categories)}"
        todo = f"list the category for all sites, or set unknown to 'drop' or 'zeros' in {FILE}"
        raise TableError(self.file, f"{problem}: {todo}", line, name)


def split(rows: Rows, columns: Columns) -> NDArray[np.bool_]:
    """Draw the test rows of one file at random.

    The test share is drawn from each class, or from all rows if the target is a number. A class of two or more rows has
    at least one test row and at least one training row. If every class has only one row, one row of the file is a test
    row. With a group column, the test share of the groups is drawn instead, whatever the classes of their rows.

    Returns:
        Whether each row is a test row, bool (N,). A file with only one row, or only one group, has no test row.
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


def _rows(count: int) -> str:
    return "is 1 row" if count == 1 else f"are {count} rows"
