"""Draft a columns.toml by guessing what columns are. A person must correct it.

It contains categories, rounded means and rounded deviations, so a site that
receives it learns these values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fl_bn.data.columns import DELIMITERS, DROP, Columns, Scale, columns_of, is_missing
from fl_bn.data.csv_files import NUMBER, checked_header, csv_files, number, read_lines, read_rows, split
from fl_bn.data.record import expect
from fl_bn.support.names import escaped, nearest, short

MOST_CATEGORIES = 50  # a column with more different texts (names of persons, say) is ignored


def draft(path: str, target: str, *, regression: bool = False, delimiter: str = ",") -> str:
    """Return the draft of a columns.toml for some CSV files.

    A column of numbers is numeric. One of more than ``MOST_CATEGORIES`` texts, or
    of none, is ignored. Others are categorical. Means and deviations are those of
    training rows that have a cell in the column, rounded to two digits of the
    deviation. The split is drawn from all rows that have a target.

    Args:
        path: a folder of CSV files, or files, separated by commas.
        target: name of the target column.
        regression: whether the target is a number. If not, the classes are its
            different texts by name, or numbers by value.
        delimiter: character between cells.

    Raises:
        DataNotFound: there is no such file.
        DataError: ``delimiter`` is not allowed, a file is no CSV, or has no target
            or no inputs.
    """
    expect(delimiter in DELIMITERS, path, "delimiter", f"one of {', '.join(map(repr, DELIMITERS))}", repr(delimiter))
    files = csv_files(path)
    cells = _cells(files, delimiter)
    expect(target in cells, files[0], "", f"a column {target!r}", f"{short(', '.join(cells))}{nearest(target, cells)}")
    kinds = {name: _kind(texts) for name, texts in cells.items() if name != target}
    values: dict[str, Any] = {
        "target": target,
        **({} if regression else {"classes": _in_order(cells[target])}),
        "missing": "refuse",
        "unknown": "refuse",
        "test-share": 0.2,
        "seed": 0,
        "delimiter": delimiter,
        "ignore": [name for name, kind in kinds.items() if kind == "ignore"],
    }
    numeric = [name for name, kind in kinds.items() if kind == "numeric"]
    categorical = {name: _in_order(cells[name]) for name, kind in kinds.items() if kind == "categorical"}
    plain = {**values, "numeric": dict.fromkeys(numeric, {}), "categorical": categorical}
    scales = _scales(files, replace(columns_of(plain), missing=DROP))
    if regression:
        values |= {f"target-{key}": value for key, value in scales[target].items()}
    return escaped(tomli_w.dumps({**values, "numeric": {name: scales[name] for name in numeric}, "categorical": categorical}))


def _cells(files: Sequence[Path], delimiter: str) -> dict[str, set[str]]:
    """Return column -> its different values, over all files."""
    found: dict[str, set[str]] = {}
    for file in files:
        _, header = next(lines := read_lines(file, delimiter))
        for _, cells in lines:
            for name, cell in zip(header, cells, strict=False):
                found.setdefault(name, set()).update([] if is_missing(cell) else [cell])
    expect(bool(found), files[0], "", "a header and rows", "no rows")
    return found


def _kind(texts: set[str]) -> str:
    """Return what a column is: numeric with a decimal comma or a wrong cell, too, which is then refused by its line."""
    few, numbers = 0 < len(texts) <= MOST_CATEGORIES, sum(bool(NUMBER.fullmatch(text.replace(",", "."))) for text in texts)
    numeric = texts and (numbers == len(texts) or numbers > len(texts) / 2 and not few)
    return "numeric" if numeric else "categorical" if few else "ignore"


def _in_order(texts: set[str]) -> list[str]:
    """Sort numbers by value, and texts by name."""
    numbers = all(NUMBER.fullmatch(text) for text in texts)
    return sorted(texts, key=(lambda text: (float(text), text)) if numbers else None)


def _scales(files: Sequence[Path], columns: Columns) -> dict[str, dict[str, float]]:
    """Compute each numeric column's mean and deviation over its cells in training rows.

    The deviation has two significant digits, and the mean the same decimal place.
    """
    bare = replace(columns, numeric={}, categorical={}, ignore=(*columns.ignore, *columns.numeric, *columns.categorical))
    found = {name: list[float]() for name in (*columns.numeric, *(() if columns.classes else (columns.target,)))}
    for file in files:
        first, *lines = read_lines(file, columns.delimiter)
        header = checked_header(file, *first, columns)
        trains = iter(~split(read_rows(file, bare), bare))  # of the rows that have a target
        for line, cells in lines:
            row = dict(zip(header, cells, strict=True))
            counts = not is_missing(row[columns.target]) and bool(next(trains))
            for name in (name for name in found if not is_missing(row[name])):
                found[name] += [number(file, line, name, row[name], Scale())] * counts
    scales = {}
    for name, values in found.items():
        mean, std = float(np.mean(values or [0.0])), (float(np.std(values)) if len({*values}) > 1 else 0.0) or 1.0
        place = 1 - math.floor(math.log10(std))
        scales[name] = {"mean": round(mean, place), "std": round(std, place)}
    return scales
