"""Load data of your own: CSV files, one per site, whose columns a columns.toml describes.

Every cell is converted with constants of columns.toml alone. Means, deviations and categories are never taken
from the data, so the data of one site do not change the numbers of another.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    """Hold rows of CSV files as measurements: ``x`` is float32 (N, inputs).

    Attributes:
        columns: the description of the columns.
    """

    columns: Columns = Columns("")


@dataclass(frozen=True)
class Rows:
    """Hold the rows of one CSV file, as numbers.

    Attributes:
        x: inputs (N, inputs).
        y: labels or values (N,).
        groups: cells of the group column; empty if there is no such column.
        note: how many rows are used, rows were left out and cells were replaced. Empty: none was left out or replaced.
    """

    x: NDArray[np.float32]
    y: NDArray[np.generic]
    groups: tuple[str, ...]
    note: str


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
        DataError: there is no path, two files have the same name, columns.toml is wrong, ``image_size`` is neither 0 nor 1,
            or a file is refused: ``part`` has the line and the column.
    """
    expect(image_size in (0, 1), "csv", "image-size", "0 or 1, as rows have no pixels", image_size)
    files = csv_files(path)
    columns = _columns(files)
    tables = [read_rows(file, columns) for file in files]
    splits = [split(table, columns) for table in tables]
    x, y = np.concatenate([table.x for table in tables]), np.concatenate([table.y for table in tables])
    test = np.concatenate(splits)
    rows = f"{len(y)} rows" + (f", and each file has only one {columns.group!r}" if columns.group else "")
    expect(bool(test.any()), files[0], "", "at least a training row and a test row", rows)
    (x_train, y_train), (x_test, y_test) = ((torch.from_numpy(x[part]), torch.from_numpy(y[part])) for part in (~test, test))
    return TableData(
        "csv",
        x_train,
        y_train,
        x_test,
        y_test,
        classes=len(columns.classes) or 1,
        columns=columns,
        notes=tuple(f"{file.name}: {table.note}" for file, table in zip(files, tables, strict=True) if table.note),
        **domains_of(files, [int((~test).sum()) for test in splits], [int(test.sum()) for test in splits]),
    )


def csv_files(path: str) -> list[Path]:
    """List the CSV files that ``path`` names. The files of a folder are in the order of their names.

    Raises:
        DataNotFound: a file does not exist, or a folder has no CSV file.
        DataError: there is no path.
    """
    expect(bool(paths(path)), "csv", "data-path", f"a folder with a .csv file per site and {FILE}, or files separated by commas", "none")
    for part in paths(path):
        if not part.exists() or not _inside(part):
            raise DataNotFound(
                f"csv: there is no .csv file {str(part)!r} (a relative path starts at the current folder, {str(Path.cwd())!r})"
            )
    return listed(path)


def listed(path: str) -> list[Path]:
    """List the CSV files that ``path`` names, without a look at whether they exist."""
    return [file for part in paths(path) for file in _inside(part)]


def _inside(part: Path) -> list[Path]:
    return [file for file in visible(part) if file.suffix.lower() == ".csv"] if part.is_dir() else [part]


def _columns(files: Sequence[Path]) -> Columns:
    """Read the columns.toml that describes all files.

    Raises:
        DataError: the files lie in several folders, and their columns.toml differ.
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
        DataError: the file is empty or not CSV, a column is missing or not described, a cell cannot be read, or no row is
            left.
    """
    lines = list(read_lines(file, columns.delimiter))
    header = _checked_header(file, *lines[0], columns)
    for line, cells in lines[1:]:
        expect(len(cells) == len(header), file, f"line {line}", f"{len(header)} cells, as the header has", len(cells))
    reader = _Reader(file, columns, [line for line, _ in lines[1:]])
    cells_of = {name: [cells[place] for _, cells in lines[1:]] for place, name in enumerate(header)}
    x = [reader.numbers(name, cells_of[name], scale) for name, scale in columns.numeric.items()]
    for name, categories in columns.categorical.items():
        codes = reader.codes(name, cells_of[name], categories)
        x += [(codes == code).astype(np.float64) for code in range(len(categories))]
    y = reader.targets(cells_of[columns.target])
    groups = cells_of.get(columns.group, [])
    reader.refuse_missing(columns.group, groups)
    used = np.array([row not in reader.left for row in range(len(y))], dtype=bool)
    expect(bool(used.any()), file, "", "rows below the header", f"none: {len(reader.left)} were left out" if reader.left else "none")
    note = f"{used.sum()} rows are used; {reader.counts()}" if reader.counts() else ""
    inputs = np.stack(x, 1).astype(np.float32)
    return Rows(inputs[used], y[used], tuple(cell for cell, use in zip(groups, used, strict=False) if use), note)


def read_lines(file: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, from 1, and its cells. The first is the header. Empty lines are skipped.

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


def _checked_header(file: Path, line: int, header: list[str], columns: Columns) -> list[str]:
    for name in columns.names:
        found = f"{short(', '.join(header))}{nearest(name, header)}"
        expect(name in header, file, place(line, name), f"this column of {FILE}, and cells between {columns.delimiter!r}", found)
    known = (*columns.names, *columns.ignore)
    for name in header:
        expect(header.count(name) == 1, file, place(line, name), "every column once", "this name more often")
        expect(name in known, file, place(line, name), f"a column that {FILE} lists", f"another{nearest(name, known)}")
    return header


def place(line: int, column: str) -> str:
    """Return the part of a CSV file that a ``DataError`` is about."""
    return f"line {line}, column {column!r}"


@dataclass(frozen=True)
class _Reader:
    """Convert the columns of one file to numbers, and note the rows to leave out and the cells that were replaced.

    Attributes:
        file: path of the file.
        columns: the description of the columns.
        lines: number of each row's line.
        left: row -> why it is left out.
        replaced: the row of each replaced cell, and what took the cell's place.
    """

    file: Path
    columns: Columns
    lines: list[int]
    left: dict[int, str] = field(default_factory=dict)
    replaced: list[tuple[int, str]] = field(default_factory=list)

    def numbers(self, name: str, cells: list[str], scale: Scale, *, fillable: bool = True) -> NDArray[np.float64]:
        """Return the scaled numbers of a column (N,): 0, the stated mean, in place of a missing one."""
        values = np.zeros(len(cells))
        for row, cell in enumerate(cells):
            if is_missing(cell):
                self._missing(row, name, cell, fillable)
                continue
            value = (float(cell) - scale.mean) / scale.std if NUMBER.fullmatch(cell) else np.nan
            if not abs(value) <= LARGEST:
                self._refuse(row, name, f"expected a finite number, like -12.5 or 3e4, but got {short(cell)}: correct the cell")
            values[row] = value
        return values

    def codes(self, name: str, cells: list[str], categories: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the place of each cell of a column among ``categories`` (N,): -1 for a missing or unknown one."""
        codes = {category: code for code, category in enumerate(categories)}
        for row, cell in enumerate(cells):
            if cell not in codes and is_missing(cell):
                self._missing(row, name, cell)
            elif cell not in codes:
                problem = f"expected one of {short(', '.join(categories))}, but got {short(cell)}{nearest(cell, categories)}"
                todo = f"{problem}: list the category for all sites, or set unknown to 'drop' or 'zeros' in {FILE}"
                self._instead(row, name, self.columns.unknown, "an unknown category", "unknown categories read as none", todo)
        return np.array([codes.get(cell, -1) for cell in cells], dtype=np.int64)

    def targets(self, cells: list[str]) -> NDArray[np.generic]:
        """Return the labels or values (N,)."""
        name, classes = self.columns.target, self.columns.classes
        if not classes:
            return self.numbers(name, cells, self.columns.target_scale, fillable=False).astype(np.float32)
        self.refuse_missing(name, [cell if cell not in classes else "listed" for cell in cells])
        for row, cell in enumerate(cells):
            if cell not in classes and not is_missing(cell):
                found = f"expected one of the classes {short(', '.join(classes))}, but got {short(cell)}{nearest(cell, classes)}"
                self._refuse(row, name, f"{found}: correct the cell, or list the class in {FILE}")
        return np.array([classes.index(cell) if cell in classes else -1 for cell in cells], dtype=np.int64)

    def refuse_missing(self, name: str, cells: list[str]) -> None:
        """Leave out the rows, or refuse the file, where a cell that is never filled in has no value."""
        for row, cell in enumerate(cells):
            if is_missing(cell):
                self._missing(row, name, cell, fillable=False)

    def counts(self) -> str:
        """Return what was left out or replaced, and how often. Cells of a row that is left out do not count."""
        replaced = [what for row, what in self.replaced if row not in self.left]
        return ", ".join(f"{what}: {count}" for what, count in sorted(Counter([*self.left.values(), *replaced]).items()))

    def _missing(self, row: int, name: str, cell: str, fillable: bool = True) -> None:
        policy = self.columns.missing if fillable or self.columns.missing == DROP else REFUSE
        todo = f"the cell has no value ({short(cell)}): give one, or set missing to 'drop'{' or fill' if fillable else ''} in {FILE}"
        self._instead(row, name, policy, "a missing value", "missing cells read as the stated mean, or as no category", todo)

    def _instead(self, row: int, name: str, policy: str, reason: str, replaced: str, problem: str) -> None:
        """Leave out the row, count a replaced cell, or refuse the file, as ``policy`` says."""
        if policy == DROP:
            self.left.setdefault(row, f"rows left out for {reason}")
        elif policy in (FILL, ZEROS):
            self.replaced.append((row, replaced))
        else:
            self._refuse(row, name, problem)

    def _refuse(self, row: int, name: str, problem: str) -> None:
        raise DataError(self.file, problem, place(self.lines[row], name))


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
