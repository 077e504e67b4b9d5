"""Describe the columns of CSV files: the target, and how cells become numbers."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_bn.data.record import DataError, DataNotFound
from fl_bn.options import option, own_options
from fl_bn.support.names import short, unknown

FILE = "columns.toml"
MISSING_CELLS = ("", "na", "n/a", "nan", "null", "?")  # in small letters; a cell that is a listed category or class counts as that
REFUSE, DROP, FILL, ZEROS = "refuse", "drop", "fill", "zeros"
DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class Scale:
    """Hold a column's constants: a number becomes ``(number - mean) / std``."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Columns:
    """Hold the content of a columns.toml.

    Attributes:
        target: name of the target column.
        classes: for each label, its text in the target's cells; empty for a number.
        target_scale: constants of a target that is a number.
        numeric: constants of numeric columns, in the order of the inputs.
        categorical: categories of categorical columns. Each is an input of 0 or 1,
            after the numeric columns.
        ignore: columns that are not used.
        group: a column, such as the patient's, whose equal cells keep rows together
            in training or test. Empty: none.
        missing: for a missing cell, refuse the file, drop the row, or fill the
            cell.
        unknown: for a category that is not listed, refuse the file, drop the row,
            or set the column's inputs to zero.
        test_share: share of each file's rows to test on.
        seed: of the split into training and test rows.
        delimiter: character between cells.
    """

    target: str = option("", "name of the target column", "a column's name", bool)
    classes: tuple[str, ...] = ()
    target_scale: Scale = Scale()
    numeric: Mapping[str, Scale] = field(default_factory=dict)
    categorical: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    group: str = option("", "name of a column whose rows stay together", "a column's name")
    missing: str = option(REFUSE, "what happens to a row with a missing cell", (REFUSE, DROP, FILL))
    unknown: str = option(REFUSE, "what happens to a row with another category", (REFUSE, DROP, ZEROS))
    test_share: float = option(0.2, "share of a file's rows to test on", "(0, 0.9]")
    seed: int = option(0, "seed of the split", ">= 0")
    delimiter: str = ","

    @property
    def inputs(self) -> int:
        """Return the number of inputs that a row has."""
        return len(self.numeric) + sum(map(len, self.categorical.values()))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the columns that every file must have."""
        return (self.target, *self.numeric, *self.categorical, *([self.group] if self.group else []))

    @property
    def digest(self) -> str:
        """Return a hash of the columns, 16 hexadecimal digits, whatever the file's layout."""
        ordered = {"numeric": list(asdict(self)["numeric"].items()), "categorical": list(self.categorical.items())}
        return hashlib.sha256(json.dumps(asdict(self) | ordered).encode()).hexdigest()[:16]


def read_columns(folder: Path) -> Columns:
    """Read ``columns.toml`` in ``folder``.

    Raises:
        DataNotFound: there is no such file.
        DataError: the file is not TOML, or a key or value is missing, unknown or
            out of range.
    """
    file = folder / FILE
    try:
        return columns_of(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except FileNotFoundError as error:
        raise DataNotFound(f"dataset 'csv': there is no {str(file)!r}: `fl-bn data columns {folder} --target NAME` drafts it") from error
    except (OSError, ValueError) as error:  # TOML's and Unicode's errors are ValueErrors
        raise DataError(file, str(error)) from error


def columns_of(values: Mapping[str, Any]) -> Columns:
    """Describe the columns from the content of a columns.toml.

    Raises:
        ValueError: a key or value is missing, unknown or out of range.
    """
    options = {spec.name: spec for spec in own_options(Columns).values()}
    others = ("classes", "ignore", "numeric", "categorical", "target-mean", "target-std", "delimiter")
    for key, value in {"target": "", **values}.items():
        if key in options:
            options[key].check(value)
        elif key not in others:
            raise ValueError(unknown("key", key, [*options, *others]))
    stated = {key.removeprefix("target-"): values[key] for key in ("target-mean", "target-std") if key in values}
    _check(not (stated and "classes" in values), "target-mean and target-std", "no classes, as they are for a number", "classes")
    numeric, categorical = (_table(key, values.get(key, {})) for key in ("numeric", "categorical"))
    columns = Columns(
        **{key.replace("-", "_"): value for key, value in values.items() if key in options},
        classes=_texts("classes", values["classes"], 2) if "classes" in values else (),
        target_scale=_scale("target", stated),
        numeric={name: _scale(f"numeric column {name!r}", value, values.get("missing") == FILL) for name, value in numeric.items()},
        categorical={name: _texts(f"categorical column {name!r}", value, 1) for name, value in categorical.items()},
        ignore=_texts("ignore", values.get("ignore", []), 0),
        delimiter=values.get("delimiter", ","),
    )
    _check(columns.delimiter in DELIMITERS, "delimiter", f"one of {', '.join(map(repr, DELIMITERS))}", columns.delimiter)
    _check(columns.inputs > 0, "[numeric] and [categorical]", "columns to learn from", "none")
    roles = [*columns.names, *columns.ignore]
    for name in roles:
        _check(roles.count(name) == 1, f"column {name!r}", "one of target, numeric, categorical, group and ignore", "several")
    return columns


def is_missing(cell: str) -> bool:
    """Return whether a cell holds no value, unless it is a listed category."""
    return cell.casefold() in MISSING_CELLS


def _check(holds: bool, what: str, wanted: str, found: object) -> None:
    if not holds:
        raise ValueError(f"{what}: expected {wanted}, but got {short(found)}")


def _table(key: str, table: Any) -> dict[str, Any]:
    _check(isinstance(table, dict), f"[{key}]", "a table with a line for each column", table)
    return dict(table)


def _texts(what: str, values: Any, least: int) -> tuple[str, ...]:
    listed = isinstance(values, list) and len(values) >= least and all(type(value) in (str, int) for value in values)
    texts = tuple(str(value).strip() for value in values) if listed else ()
    _check(listed and len(set(texts)) == len(texts), what, f"a list of at least {least} texts, each once, as in the cells", values)
    return texts


def _scale(what: str, values: Any, fills: bool = False) -> Scale:
    known = isinstance(values, dict) and values.keys() <= {"mean", "std"}
    finite = known and all(type(value) in (int, float) and math.isfinite(value) for value in values.values())
    wanted = "{mean = NUMBER, std = POSITIVE NUMBER}" + (", since missing = 'fill' fills in the mean" if fills else ", or {}")
    _check(finite and values.get("std", 1.0) > 0 and ("mean" in values or not fills), what, wanted, values)
    return Scale(float(values.get("mean", 0.0)), float(values.get("std", 1.0)))
