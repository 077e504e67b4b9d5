"""Read a report's settings: [report], [paper] and [notes] of a ``sweep.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_bn.app.config import ConfigError
from fl_bn.support.names import expected, nearest, unknown

SEED = "seed"  # the axis over which results are averaged
X = ("round", "bytes", "exchanges", "local-steps")
AT = ("last", "best")
EACH, AVERAGE = "each", "average"  # values of Settings.domains
TEXTS = "a list of texts"
REPORT = {
    "title": str, "rows": str, "columns": TEXTS, "metric": str, "at": str, "x": TEXTS, "against": TEXTS, "domains": None,
}  # fmt: skip
"""Key of [report] -> the type of its value; None: several types."""


@dataclass(frozen=True)
class Paper:
    """Hold the numbers of the paper whose table a sweep reproduces.

    Attributes:
        source: The name of the paper and its table.
        note: A remark about the numbers.
        numbers: The numbers, as the paper prints them, by row and column.
    """

    source: str = ""
    note: str = ""
    numbers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """Hold the settings of a report.

    Attributes:
        title: The heading.
        rows: The axis of the rows; empty: the axis ``method``, or else the first
            axis.
        columns: The axes of the columns; None: all axes other than ``rows``.
        metric: The metric of the table; empty: that of the runs' task.
        at: The round of the table: ``last``, or ``best`` for the round with the
            best metric.
        x: The quantities on the horizontal axes of curves, from ``X``.
        against: The numeric axes of the sweep against which to draw the metric.
        domains: ``EACH``: report every domain and their mean; ``AVERAGE``: report
            the mean only; empty: report the metric on all test data.
        notes: A text for the page.
        order: The values of each axis, in the order of the sweep file.
    """

    title: str
    rows: str = ""
    columns: tuple[str, ...] | None = None
    metric: str = ""
    at: str = "last"
    x: tuple[str, ...] = ("round",)
    against: tuple[str, ...] = ()
    domains: str = ""
    paper: Paper = Paper()
    notes: str = ""
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    text: str = ""


def read_settings(folder: Path) -> Settings:
    """Read the settings from ``sweep.toml`` in the folder of a sweep.

    If the file is missing, is not TOML, or has a wrong key or value,
    ``ConfigError`` is raised.
    """
    file = folder / "sweep.toml"
    try:
        text = file.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a sweep, since it has no sweep.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from error
    try:
        return parse_settings(tables, folder.name, text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def label(value: Any) -> str:
    """Return a value on an axis as text, as pages and sweep files show it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_settings(tables: Mapping[str, Any], name: str, text: str) -> Settings:
    """Parse the tables of a sweep file, or raise ``ConfigError`` for an unknown key or wrong value.

    ``name`` is the default title; the settings keep ``text``.
    """
    report = _values(tables, "report", REPORT)
    paper = _values(tables, "paper", {"source": str, "note": str, "numbers": None})
    notes = _values(tables, "notes", {"text": str})
    for key, known, named in (("at", AT, [report.get("at", "last")]), ("x", X, report.get("x", ()))):
        if others := [name for name in named if name not in known]:
            raise ConfigError(expected(key, others[0], known))
    if (domains := report.get("domains", False)) not in (True, False, AVERAGE):
        raise ConfigError(f"domains must be true, false or {AVERAGE!r}, but got {domains!r}")
    own = {key: value for key, value in report.items() if key not in ("title", "domains")}
    return Settings(
        **own,
        title=report.get("title") or str(tables.get("title") or name),
        domains=AVERAGE if domains == AVERAGE else EACH if domains else "",
        paper=Paper(paper.get("source", ""), paper.get("note", ""), _numbers(paper.get("numbers", {}))),
        notes=notes.get("text", ""),
        order=_order(tables),
        text=text,
    )


def check_axis(axis: str, what: str, known: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless ``axis``, which the key ``what`` names, is one of ``known``."""
    if axis not in known:
        raise ConfigError(f"[report] {what} names the axis {axis!r}, which no run has{nearest(axis, known)} (axes: {', '.join(known)})")


def _order(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return every axis's values as in [axes], [run] and the variants of a sweep file."""
    variants = [table for table in table_of(tables, "variants").values() if isinstance(table, dict)]
    order: dict[str, list[str]] = {}
    for source in (tables, *variants):
        axes = {**table_of(source, "axes"), **{key: value for key, value in table_of(source, "run").items() if isinstance(value, list)}}
        for axis, values in axes.items():
            if isinstance(values, dict | list):
                known = order.setdefault(axis, [])
                known += [name for name in map(label, values) if name not in known]
    return order


def _numbers(table: Any) -> dict[str, dict[str, str]]:
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise ConfigError(f'[paper] numbers must be {{ ROW = {{ COLUMN = "45.2" }} }}, but got {table!r}')
    return {row: {column: str(number) for column, number in columns.items()} for row, columns in table.items()}


def table_of(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table ``name`` of a sweep file, or an empty one. ``ConfigError``: it is no table."""
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table, but got {table!r}")
    return table


def check_names(table: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise ``ConfigError`` unless all names in a table, each a ``what``, are ``known``."""
    for name in table:
        if name not in known:
            raise ConfigError(unknown(what, name, list(known)))


def _values(tables: Mapping[str, Any], name: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the table ``name``, each of its type in ``kinds``."""
    table = table_of(tables, name)
    check_names(table, kinds, f"key in [{name}]:")
    return {key: _checked(key, value, kinds[key]) for key, value in table.items()}


def _checked(key: str, value: Any, kind: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if kind is None:
        return value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts) or (kind is str and not isinstance(value, str)):
        raise ConfigError(f"{key} must be {'a text' if kind is str else TEXTS}, but got {value!r}")
    return value.strip() if kind is str else tuple(texts)
