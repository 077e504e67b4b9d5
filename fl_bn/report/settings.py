"""Read the settings of a report: the tables [report], [paper] and [notes] of a sweep's ``sweep.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_bn.run.config import ConfigError
from fl_bn.support.names import expected, nearest, unknown

SEED = "seed"  # the axis over which results are averaged
X = ("round", "bytes", "exchanges", "local-steps")
AT = ("last", "best")
KEYS = ("title", "rows", "columns", "metric", "at", "x", "against", "heat", "boxplot", "per-class", "drift", "domains", "apart", "worst")
EACH, AVERAGE = "each", "average"  # values of Settings.domains
HEAT = ("x", "y", "value", "minus")
PAPER = ("source", "note", "numbers")


@dataclass(frozen=True)
class Heat:
    """Describe a heat map.

    Attributes:
        x: The axis of the sweep that is drawn horizontally.
        y: The axis of the sweep that is drawn vertically.
        value: The row to draw; empty: draw one map per row.
        minus: The row to subtract from the row ``value``; empty: nothing is subtracted.
    """

    x: str
    y: str
    value: str = ""
    minus: str = ""


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
        rows: The axis of the rows; empty: the axis ``method``, or else the first axis.
        columns: The axes of the columns; None: all axes other than ``rows``.
        metric: The metric of the table; empty: the metric of the runs' task.
        at: The round whose metric the table shows: ``last``, or ``best`` for the round with the best metric.
        x: The quantities on the horizontal axes of curves, from ``X``.
        against: The numeric axes of the sweep against which to draw the metric.
        heat: The heat map; None: none.
        boxplot: Draw box plots of the metric at the clients.
        per_class: Draw the accuracy of each class.
        drift: Draw the drift of the running statistics, and the diagnostics.
        domains: ``EACH``: report every domain and their mean; ``AVERAGE``: report the mean only; empty: report the
            metric on all test data.
        apart: Rows that cannot be compared with the other rows. They are never marked as the best.
        worst: An axis, such as the attack. Each entry has the runs of the value on it under which the metric is worst. Empty: none.
        paper: The paper's numbers.
        notes: A text for the page; empty: none.
        order: The values of each axis, in the order of the sweep file.
        skip: The combinations that the sweep file skips.
        text: The text of the sweep file.
    """

    title: str
    rows: str = ""
    columns: tuple[str, ...] | None = None
    metric: str = ""
    at: str = "last"
    x: tuple[str, ...] = ("round",)
    against: tuple[str, ...] = ()
    heat: Heat | None = None
    boxplot: bool = False
    per_class: bool = False
    drift: bool = False
    domains: str = ""
    apart: tuple[str, ...] = ()
    worst: str = ""
    paper: Paper = Paper()
    notes: str = ""
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    skip: tuple[Mapping[str, str], ...] = ()
    text: str = ""

    def leaves_out(self, where: Mapping[str, str]) -> bool:
        """Return whether the sweep skips a combination.

        Args:
            where: The values of the combination on the axes, as text.
        """
        return any(combination.items() <= where.items() for combination in self.skip)


def read_settings(folder: Path) -> Settings:
    """Read the settings from ``sweep.toml`` in the folder of a sweep.

    Raises:
        ConfigError: The file is missing, is not TOML, or has an unknown key or a wrong value.
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
    """Return a value on an axis as text, as pages show it and as [paper] and [report] write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_settings(tables: Mapping[str, Any], name: str, text: str) -> Settings:
    """Parse the tables of a sweep file.

    Args:
        tables: The tables.
        name: The title if the file has none.
        text: The text of the file, which the settings keep.

    Raises:
        ConfigError: A key or a value is unknown, or of the wrong type.
    """
    report, paper, notes = (_table(tables, key) for key in ("report", "paper", "notes"))
    _only(KEYS, report, "[report]")
    _only(PAPER, paper, "[paper]")
    columns = report.get("columns")
    return Settings(
        title=_text(report, "title") or _text(tables, "title") or name,
        rows=_text(report, "rows"),
        columns=None if columns is None else _texts("columns", columns),
        metric=_text(report, "metric"),
        at=_one_of("at", _text(report, "at", "last"), AT),
        x=tuple(_one_of("x", value, X) for value in _texts("x", report.get("x", ["round"]))),
        against=_texts("against", report.get("against", [])),
        heat=_heat(report["heat"]) if "heat" in report else None,
        boxplot=_flag(report, "boxplot"),
        per_class=_flag(report, "per-class"),
        drift=_flag(report, "drift"),
        domains=AVERAGE if report.get("domains") == AVERAGE else EACH if _flag(report, "domains") else "",
        apart=_texts("apart", report.get("apart", [])),
        worst=_text(report, "worst"),
        paper=Paper(_text(paper, "source"), _text(paper, "note"), _numbers(paper.get("numbers", {}))),
        notes=_text(notes, "text"),
        order=_order(tables),
        skip=_skip(tables.get("skip", [])),
        text=text,
    )


def check_axis(axis: str, what: str, known: Sequence[str]) -> None:
    """Check that ``axis`` is one of ``known``.

    Args:
        axis: The axis that [report] names.
        what: The key of [report] that names the axis.
        known: The axes of the runs.

    Raises:
        ConfigError: No run has this axis.
    """
    if axis not in known:
        raise ConfigError(f"[report] {what} names the axis {axis!r}, which no run has{nearest(axis, known)} (axes: {', '.join(known)})")


def _order(tables: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values of every axis, in the order in which the sweep file lists them in [axes], [run] and the variants."""
    variants = [table for table in _table(tables, "variants").values() if isinstance(table, dict)]
    order: dict[str, list[str]] = {}
    for source in (tables, *variants):
        axes = {**_table(source, "axes"), **{key: value for key, value in _table(source, "run").items() if isinstance(value, list)}}
        for axis, values in axes.items():
            if isinstance(values, dict | list):
                known = order.setdefault(axis, [])
                known += [name for name in map(label, values) if name not in known]
    return order


def _skip(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not all(isinstance(combination, dict) and combination for combination in value):
        raise ConfigError(f"skip must be a list of tables as in [{{ AXIS = VALUE }}], but got {value!r}")
    return tuple({axis: label(at) for axis, at in combination.items()} for combination in value)


def _heat(value: Any) -> Heat:
    if not isinstance(value, dict):
        raise ConfigError(f'heat must be a table as in {{ x = "AXIS", y = "AXIS" }}, but got {value!r}')
    _only(HEAT, value, "heat")
    heat = Heat(**{key: label(value[key]) for key in value}) if {"x", "y"} <= set(value) else None
    if heat is None or heat.x == heat.y:
        raise ConfigError(f"heat needs two axes, x and y, but got {value!r}")
    if heat.minus and not heat.value:
        raise ConfigError(f"heat: minus={heat.minus!r} is subtracted from value, which is missing: give value too")
    return heat


def _numbers(table: Any) -> dict[str, dict[str, str]]:
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise ConfigError(f'[paper] numbers must be {{ ROW = {{ COLUMN = "45.2" }} }}, but got {table!r}')
    return {row: {column: str(number) for column, number in columns.items()} for row, columns in table.items()}


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table, but got {table!r}")
    return table


def _text(table: Mapping[str, Any], key: str, default: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a text, but got {value!r}")
    return value.strip()


def _texts(key: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ConfigError(f"{key} must be a list of texts, but got {value!r}")
    return tuple(values)


def _flag(table: Mapping[str, Any], key: str) -> bool:
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, but got {value!r}")
    return value


def _one_of(key: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(expected(key, value, known))
    return value


def _only(known: Sequence[str], table: Mapping[str, Any], where: str) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(unknown("key", key, known, f" in {where}"))
