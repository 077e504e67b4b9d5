"""Describe a table's columns in columns.toml. All sites of a run use the same file, so equal cells become equal inputs."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_bn.data.record import DataNotFound
from fl_bn.support.names import expected, short, unknown

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
        ValueError: the file is not TOML, or a key or a value is missing, unknown or out of range.
    """
    file = folder / FILE
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise DataNotFound(
            f"dataset 'csv': there is no {str(file)!r}, which describes the columns of all sites: `fl-bn data columns {folder} --target "
            "NAME` writes a draft of it"
        ) from error
    except (OSError, ValueError) as error:  # TOML's and Unicode's errors are ValueErrors
        raise ValueError(f"{file}: expected TOML in UTF-8, but could not read it: {error}") from error
    try:
        return columns_of(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def columns_of(values: Mapping[str, Any]) -> Columns:
    """Make the description of the columns from the content of a columns.toml.

    Raises:
        ValueError: a key or a value is missing, unknown or out of range.
    """
    known = ("target", "classes", "target-mean", "target-std", "numeric", "categorical", "ignore", "group", "missing", "unknown",
             "test-share", "seed", "delimiter")  # fmt: skip
    for key in values:
        if key not in known:
            raise ValueError(unknown("key", key, known))
    if "target" not in values:
        raise ValueError('expected the name of the target column, target = "NAME", but there is none')
    classes = _texts("classes", values["classes"], 2) if "classes" in values else ()
    scaled = {key.removeprefix("target-"): values[key] for key in ("target-mean", "target-std") if key in values}
    if classes and scaled:
        raise ValueError(
            "target-mean and target-std are for a target that is a number, but the target has classes: leave out either these keys or "
            "classes"
        )
    columns = Columns(
        target=_text("target", values["target"]),
        classes=classes,
        target_scale=_scale("the target", scaled),
        numeric={name: _scale(f"numeric column {name!r}", scale) for name, scale in _table("numeric", values).items()},
        categorical={name: _texts(f"categorical column {name!r}", texts, 1) for name, texts in _table("categorical", values).items()},
        ignore=_texts("ignore", values.get("ignore", []), 0),
        group=_text("group", values["group"]) if "group" in values else "",
        missing=_choice("missing", values.get("missing", REFUSE), MISSING),
        unknown=_choice("unknown", values.get("unknown", REFUSE), UNKNOWN),
        test_share=_number("test-share", values.get("test-share", 0.2)),
        seed=values.get("seed", 0),
        delimiter=_choice("delimiter", values.get("delimiter", ","), DELIMITERS),
    )
    if not 0 < columns.test_share <= MOST_SHARE:
        raise ValueError(f"test-share must be in (0, {MOST_SHARE:g}], but got {columns.test_share:g}")
    if type(columns.seed) is not int or columns.seed < 0:
        raise ValueError(f"seed must be a whole number of 0 or more, but got {short(columns.seed)}")
    if not columns.inputs:
        raise ValueError("expected columns to learn from, in [numeric] or [categorical], but there are none")
    roles = [columns.target, *columns.numeric, *columns.categorical, *columns.ignore]
    if twice := [name for name in roles if roles.count(name) > 1]:
        raise ValueError(f"column {twice[0]!r} is listed twice: a column is the target, numeric, categorical or ignored")
    if columns.group in roles:
        raise ValueError(f"column {columns.group!r} is the group, but is also listed in another place: list it only as the group")
    return columns


def is_missing(cell: str) -> bool:
    """Return whether a cell has no value: it is empty, or one of ``MISSING_CELLS``, such as ``NA``."""
    return cell.casefold() in MISSING_CELLS


def _table(key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"[{key}] must be a table with a line for each column, but is {short(table)}")
    return {_text(f"a column of [{key}]", name): value for name, value in table.items()}


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a text, but is {short(value)}")
    return value.strip()


def _texts(what: str, values: Any, least: int) -> tuple[str, ...]:
    """Return the entries of a list as texts. A whole number becomes the text of its digits."""
    if not isinstance(values, list) or len(values) < least or not all(type(value) in (str, int) for value in values):
        few = f"at least {least} texts" if least else "texts"
        raise ValueError(f"{what} must be a list of {few}, written as in the cells, but is {short(values)}")
    texts = tuple(str(value).strip() for value in values)
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise ValueError(f"{what} must list every text once, but {twice[0]!r} occurs more often")
    return texts


def _scale(what: str, values: Any) -> Scale:
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be {{mean = NUMBER, std = NUMBER}}, or {{}} for values as they are, but is {short(values)}")
    for key in values:
        if key not in ("mean", "std"):
            raise ValueError(unknown("key", key, ("mean", "std"), f" of {what}"))
    scale = Scale(*(_number(f"{key} of {what}", values.get(key, default)) for key, default in (("mean", 0.0), ("std", 1.0))))
    if scale.std <= 0:
        raise ValueError(f"std of {what} must be positive, but is {scale.std:g}")
    return scale


def _number(what: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, but is {short(value)}")
    return float(value)


def _choice(key: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(expected(key, value, list(map(repr, known))))
    return str(value)
