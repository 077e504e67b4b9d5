"""Describe a table's columns in columns.toml. All sites of a run use the same file, so equal cells become equal inputs."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fl_bn.data.record import DataError, DataNotFound
from fl_bn.support.names import check_name, short, unknown

FILE = "columns.toml"
MISSING_CELLS = ("", "na", "n/a", "nan", "null", "?")  # in small letters; a cell that is a listed category or class counts as that
REFUSE, DROP, FILL, ZEROS = "refuse", "drop", "fill", "zeros"
MISSING, UNKNOWN = (REFUSE, DROP, FILL), (REFUSE, DROP, ZEROS)
DELIMITERS = (",", ";", "\t", "|")
MOST_SHARE = 0.9


@dataclass(frozen=True)
class Scale:
    """Hold the constants of a numeric column: the network receives ``(value - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Columns:
    """Hold the content of a columns.toml.

    Attributes:
        target: name of the target column.
        classes: for each label, the text in the target's cells; empty for a target that is a number.
        target_scale: constants of a target that is a number.
        numeric: constants of each numeric column, in the order of the network's inputs.
        categorical: categories of each categorical column. The network has an input of 0 or 1 for each category, after the
            numeric columns.
        ignore: names of columns that are not used.
        group: name of a column, such as the patient's. Rows with the same cell in this column are all training rows or all test rows.
            Empty: there is no such column.
        missing: what happens to a row with a missing cell: the file is refused, the row is dropped, or the cell is filled. One
            of ``MISSING``.
        unknown: what happens to a row with a category that is not listed: the file is refused, the row is dropped, or all
            inputs of the column are zeros. One of ``UNKNOWN``.
        test_share: share of a file's rows to test on.
        seed: seed of the split into training and test rows.
        delimiter: character between cells.
    """

    target: str
    classes: tuple[str, ...] = ()
    target_scale: Scale = Scale()
    numeric: Mapping[str, Scale] = field(default_factory=dict)
    categorical: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    group: str = ""
    missing: str = REFUSE
    unknown: str = REFUSE
    test_share: float = 0.2
    seed: int = 0
    delimiter: str = ","

    @property
    def inputs(self) -> int:
        """Return the number of network inputs that are made from a row."""
        return len(self.numeric) + sum(map(len, self.categorical.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the columns that every file must have."""
        return (self.target, *self.numeric, *self.categorical, *([self.group] if self.group else []))

    @property
    def digest(self) -> str:
        """Return a hash of the columns, 16 hexadecimal digits. Comments and layout of the file do not change the hash."""
        ordered = {"numeric": list(asdict(self)["numeric"].items()), "categorical": list(self.categorical.items())}
        return hashlib.sha256(json.dumps(asdict(self) | ordered).encode()).hexdigest()[:16]


def read_columns(folder: Path) -> Columns:
    """Read ``columns.toml`` in ``folder``.

    Raises:
        DataNotFound: there is no such file.
        DataError: the file is not TOML, or a key or a value is missing, unknown or out of range.
    """
    file = folder / FILE
    try:
        return columns_of(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except FileNotFoundError as error:
        raise DataNotFound(
            f"dataset 'csv': there is no {str(file)!r}, which describes the columns of all sites: `fl-bn data columns {folder} "
            "--target NAME` writes a draft of it"
        ) from error
    except (OSError, ValueError) as error:  # TOML's and Unicode's errors are ValueErrors
        raise DataError(file, str(error)) from error


def columns_of(values: Mapping[str, Any]) -> Columns:
    """Make the description of the columns from the content of a columns.toml.

    Raises:
        ValueError: a key or a value is missing, unknown or out of range.
    """
    for key in values:
        if key not in _READ:
            raise ValueError(unknown("key", key, _READ))
    _check("target" in values, "target", "the name of the target column", "none")
    read = {key: _READ[key](key, value) for key, value in values.items()}
    stated = {key.removeprefix("target-"): read.pop(key) for key in ("target-mean", "target-std") if key in read}
    _check(not (stated and "classes" in read), "target-mean and target-std", "no classes, as they are for a number", "classes")
    columns = Columns(**{key.replace("-", "_"): value for key, value in read.items()}, target_scale=_scale("target", stated))
    _check(columns.inputs > 0, "[numeric] and [categorical]", "columns to learn from", "none")
    roles = [*columns.names, *columns.ignore]
    for name in roles:
        _check(roles.count(name) == 1, f"column {name!r}", "one of target, numeric, categorical, group and ignore", "several")
    return columns


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value: it is empty, or one of ``MISSING_CELLS``, such as ``NA``."""
    return cell.casefold() in MISSING_CELLS


def _check(holds: bool, what: str, wanted: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{what}: expected {wanted}, but got {short(found)}")


def _text(what: str, value: Any) -> str:
    _check(isinstance(value, str) and bool(value.strip()), what, "a text", value)
    return str(value).strip()


def _texts(what: str, values: Any, least: int = 0) -> tuple[str, ...]:
    """Return the entries of a list as texts. A whole number becomes the text of its digits."""
    listed = isinstance(values, list) and len(values) >= least and all(type(value) in (str, int) for value in values)
    _check(listed, what, f"a list of at least {least} texts, written as in the cells", values)
    texts = tuple(str(value).strip() for value in values)
    _check(len(set(texts)) == len(texts), what, "every text once", values)
    return texts


def _number(what: str, value: Any) -> float:
    _check(type(value) in (int, float) and math.isfinite(value), what, "a finite number", value)
    return float(value)


def _positive(what: str, value: Any) -> float:
    _check(_number(what, value) > 0, what, "a positive number", value)
    return float(value)


def _share(what: str, value: Any) -> float:
    _check(0 < _number(what, value) <= MOST_SHARE, what, f"a number in (0, {MOST_SHARE:g}]", value)
    return float(value)


def _seed(what: str, value: Any) -> int:
    _check(type(value) is int and value >= 0, what, "a whole number of 0 or more", value)
    return int(value)


def _scale(what: str, values: Any) -> Scale:
    _check(isinstance(values, dict) and values.keys() <= {"mean", "std"}, what, "{mean = NUMBER, std = NUMBER}, or {}", values)
    return Scale(_number(f"mean of {what}", values.get("mean", 0.0)), _positive(f"std of {what}", values.get("std", 1.0)))


def _table(read: Callable[[str, Any], Any], key: str, table: Any) -> dict[str, Any]:
    _check(isinstance(table, dict), f"[{key}]", "a table with a line for each column", table)
    return {_text(f"a column of [{key}]", name): read(f"{key} column {name!r}", value) for name, value in table.items()}


def _choice(known: tuple[str, ...], key: str, value: Any) -> str:
    check_name(key, value, tuple(map(repr, known)) if value not in known else known)
    return str(value)


_READ: dict[str, Callable[[str, Any], Any]] = {
    "target": _text,
    "classes": partial(_texts, least=2),
    "target-mean": _number,
    "target-std": _positive,
    "numeric": partial(_table, _scale),
    "categorical": partial(_table, partial(_texts, least=1)),
    "ignore": _texts,
    "group": _text,
    "missing": partial(_choice, MISSING),
    "unknown": partial(_choice, UNKNOWN),
    "test-share": _share,
    "seed": _seed,
    "delimiter": partial(_choice, DELIMITERS),
}
"""Key of a columns.toml -> how its value is read."""
