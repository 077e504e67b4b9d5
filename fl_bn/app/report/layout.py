"""Place runs in rows and columns, and make the table of results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from fl_bn.app.report.cells import GIGABYTES, MEGABYTES, Cell, scale, title
from fl_bn.app.report.settings import AVERAGE, SEED, Settings, check_axis
from fl_bn.task import CLASSIFICATION

NOT_RUN = "not run"  # the text in an entry without runs
DOMAIN = "domain"  # the axis that `by_domain` adds


@dataclass(frozen=True)
class Entry:
    """Hold one entry of the table.

    Attributes:
        values: The finite values, one per seed.
        runs: The number of seeds that were run, with and without a value.
        instead: The text that the table shows if there is no value.
        paper: The number that the paper prints, if any.
    """

    values: tuple[float, ...] = ()
    runs: int = 0
    instead: str = NOT_RUN
    paper: str = ""

    @property
    def mean(self) -> float:
        """Return the mean over seeds; NaN without a value."""
        return fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Return the sample standard deviation over seeds; NaN for fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Layout:
    """Hold the runs of a sweep by row and column.

    Attributes:
        cells: The runs that can be read.
        row_axis: The axis of the rows.
        rest: The axes whose combinations of values are the columns.
        groups: The runs of each (row, column), one per seed.
    """

    settings: Settings
    cells: tuple[Cell, ...]
    row_axis: str
    rest: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    groups: Mapping[tuple[str, str], tuple[Cell, ...]]

    @property
    def metric(self) -> str:
        """Return the metric of the table."""
        return self.settings.metric

    def title(self, metric: str = "") -> str:
        """Return the name of ``metric`` or of the table's, with the samples if all runs have the same."""
        splits = {cell.split for cell in self.cells}
        return title(metric or self.metric, splits.pop() if len(splits) == 1 else "")

    @property
    def lower_is_better(self) -> bool:
        """Return whether a lower value of the metric is better."""
        return any(cell.lower_is_better(self.metric) for cell in self.cells)

    def finished(self, row: str, column: str) -> list[Cell]:
        """Return the finished runs in a row and a column."""
        return [cell for cell in self.groups.get((row, column), ()) if cell.finished]

    def heading(self, axes: Sequence[str], values: Sequence[str]) -> str:
        """Return the heading of a panel for the runs with ``values`` on ``axes``.

        A number, ``true`` or ``false`` follows its axis. A dash, for runs without
        it, becomes ``no AXIS``.
        """
        parts = []
        for axis, value in zip(axes, values, strict=True):
            bare = is_number(value) or value in ("true", "false")
            parts.append(f"no {axis}" if value == "–" else f"{axis} {value}" if bare else value)
        return ", ".join(parts)

    def column_heading(self, column: str) -> str:
        """Return the heading of a column; empty if there is only one."""
        of = next(cells[0] for (_, c), cells in self.groups.items() if c == column)
        return self.heading(self.rest, [of.at(axis) for axis in self.rest]) if self.rest else ""

    def entry(self, cells: Sequence[Cell]) -> Entry:
        """Return the entry of ``cells``, which differ only in the seed."""
        values = [point[1] for cell in cells if cell.finished and (point := cell.measurement(self.metric, self.settings.at)) is not None]
        kept = tuple(value for value in values if math.isfinite(value))
        instead = "not finite" if values else "not measured" if any(c.finished for c in cells) else cells[0].status if cells else NOT_RUN
        return Entry(kept, len(cells), instead)

    def by(self, axes: Sequence[str], cells: Sequence[Cell] | None = None) -> dict[tuple[str, ...], list[Cell]]:
        """Group runs by their values on ``axes``, in the order of the sweep file."""
        groups: dict[tuple[str, ...], list[Cell]] = {}
        cells = self.cells if cells is None else cells
        places = {axis: {value: n for n, value in enumerate(self.values(axis, cells))} for axis in axes}
        for cell in cells:
            groups.setdefault(tuple(cell.at(axis) for axis in axes), []).append(cell)
        return {key: groups[key] for key in sorted(groups, key=lambda key: [places[a][v] for a, v in zip(axes, key, strict=True)])}

    def values(self, axis: str, cells: Sequence[Cell] | None = None) -> list[str]:
        """Return the values of ``cells`` on ``axis``, in the order of the sweep file.

        Values that it does not list come last, numbers by size.
        """
        values = list(dict.fromkeys(cell.at(axis) for cell in (self.cells if cells is None else cells)))
        listed = [value for value in self.settings.order.get(axis, ()) if value in values]
        others = [value for value in values if value not in listed]
        return [*listed, *(sorted(others, key=float) if all(map(is_number, others)) else others)]

    @property
    def axes(self) -> list[str]:
        """Return the axes of the runs."""
        return _axes(self.cells)


@dataclass(frozen=True)
class Table:
    """Hold the table of results.

    Attributes:
        entries: The entry of each row and column, in percent if the metric is a
            share.
        best: The (row, column) of the best entries of each column.
        problems: The names of the runs that the table leaves out, with the reasons.
        corner: The heading above the names of the rows.
    """

    layout: Layout
    entries: Mapping[str, Mapping[str, Entry]]
    best: frozenset[tuple[str, str]]
    problems: Mapping[str, str]
    corner: str

    @property
    def caption(self) -> str:
        """Return the caption, with the metric, its round, and the number of seeds."""
        at = "best round, chosen by this very number" if self.layout.settings.at == "best" else "last round"
        of_domains = any(row.get("per-domain") for cell in self.layout.cells for row in cell.rows)
        at += ", mean over the domains" if of_domains and self.layout.settings.domains == AVERAGE else ""
        of = f"mean (standard deviation) over {self.seeds} seeds" if self.seeds > 1 else "one seed"
        of += "" if self.same_runs else " where nothing else is said"
        printed = any(entry.paper for row in self.entries.values() for entry in row.values())
        paper = f"; in brackets: {self.layout.settings.paper.source or 'the paper'}" if printed else ""
        name = self.layout.title()
        return f"{name[:1].upper()}{name[1:]}, {at}: {of}{paper}."

    @property
    def seeds(self) -> int:
        """Return the most frequent number of seeds among the entries; 0: no entry has a value."""
        return Counter(len(entry.values) for entry in self._filled).most_common(1)[0][0] if self._filled else 0

    @property
    def same_runs(self) -> bool:
        """Return whether all entries with a value have as many seeds, each with a value."""
        return all(len(entry.values) == self.seeds == entry.runs for entry in self._filled)

    @property
    def _filled(self) -> list[Entry]:
        return [entry for row in self.entries.values() for entry in row.values() if entry.values]


def lay_out(settings: Settings, cells: Sequence[Cell]) -> Layout:
    """Place the runs in rows and columns.

    An axis with several values becomes columns even if [report] does not name it,
    so only runs that differ in nothing but the seed are averaged. ``ConfigError``:
    [report] names an axis that no run has.
    """
    readable = tuple(cell for cell in cells if cell.status not in ("unreadable", "left out"))
    metric = settings.metric or next((cell.metric for cell in readable if cell.rows), CLASSIFICATION.metric)
    settings = replace(settings, metric=metric)
    axes = [axis for axis in _axes(readable) if axis != SEED]
    row_axis = settings.rows or ("method" if "method" in axes else axes[0] if axes else "")
    for what, names in (("rows", (settings.rows,)), ("columns", settings.columns or ())):
        for name in filter(None, names):
            check_axis(name, what, axes)
    empty = Layout(settings, readable, row_axis, (), (), (), {})
    named = [axis for axis in settings.columns or () if axis != row_axis]
    others = [axis for axis in axes if axis not in (row_axis, *named)]
    if settings.columns is not None:
        others = [axis for axis in others if len(empty.values(axis)) > 1]
    rest = (*named, *others)
    groups: dict[tuple[str, str], tuple[Cell, ...]] = {}
    by_column = {", ".join(key) or metric: of for key, of in empty.by(rest).items()}
    for column, of in by_column.items():
        for (row,), runs in empty.by((row_axis,), of).items():
            groups[row, column] = tuple(sorted(runs, key=lambda cell: (len(cell.at(SEED)), cell.at(SEED))))
    return replace(empty, rest=rest, rows=tuple(empty.values(row_axis)), columns=tuple(by_column), groups=groups)


def by_domain(cells: Sequence[Cell], each: bool = True) -> list[Cell]:
    """Replace each run by copies for the mean over the domains and, with ``each``, per domain.

    A copy's metric is that on the domain's test data, or the mean of these. With
    ``each``, there is one more axis, ``domain``. A run without metrics per domain
    stays as it is, as a copy of the mean.
    """
    split = []
    # a domain that has a value in no run has no such metric, such as an AUC of one class
    of = {name for cell in cells for row in cell.rows for name, value in (row.get("per-domain") or {}).items() if value is not None}
    for cell in cells:
        names = list(dict.fromkeys(name for row in cell.rows for name in row.get("per-domain") or ())) if each else []
        for name in names:
            own = tuple({**row, cell.metric: (row.get("per-domain") or {}).get(name), "per-domain": None} for row in cell.rows)
            split.append(replace(cell, axes={**cell.axes, DOMAIN: name}, rows=own))
        means = tuple({**row, cell.metric: _mean(row["per-domain"], of)} if row.get("per-domain") else row for row in cell.rows)
        split.append(replace(cell, axes={**cell.axes, DOMAIN: AVERAGE} if each else cell.axes, rows=means))
    return split


def _mean(values: Mapping[str, float | None], of: Container[str]) -> float | None:
    """Return the mean over the domains ``of``; None: one diverged."""
    known = [value for name, value in values.items() if name in of]
    return None if None in known or not known else sum(known) / len(known)  # type: ignore[arg-type]


def tabulate(layout: Layout, cells: Sequence[Cell]) -> Table:
    """Make the table of results. ``cells`` are all runs, also those that cannot be read."""
    numbers = layout.settings.paper.numbers
    entries: dict[str, dict[str, Entry]] = {}
    for row in layout.rows:
        for column in layout.columns:
            made = layout.entry(layout.groups.get((row, column), ()))
            entries.setdefault(row, {})[column] = replace(made, paper=numbers.get(row, {}).get(column, ""))
    best = {(row, column) for column in layout.columns for row in _best(entries, column, layout)}
    problems = {cell.name: why for cell in cells if (why := _wrong(cell, layout.metric, layout.settings.at))}
    corner = " \\ ".join(part for part in (layout.row_axis, ", ".join(layout.rest)) if part)
    return Table(layout, entries, frozenset(best), problems, corner)


def as_text(value: float, metric: str) -> str:
    """Format a value of ``metric`` for the table; a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if metric in (MEGABYTES, GIGABYTES):
        return f"{value:.4f}"
    return f"{value:.1f}" if scale(metric) == 100 else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _wrong(cell: Cell, metric: str, at: str) -> str:
    if not cell.finished:
        error = " ".join(cell.error.split())
        return f"{cell.status}: {error}" if error else f"{cell.status} after {len(cell.rows)} of {cell.config.get('rounds', '?')} rounds"
    point = cell.measurement(metric, at)
    if point is None:
        return f"{metric} was not measured"
    return "" if math.isfinite(point[1]) else f"{metric} was not a finite number in round {point[0]}"


def _best(entries: Mapping[str, Mapping[str, Entry]], column: str, layout: Layout) -> list[str]:
    """Return the rows with a column's best number; none if there are fewer than two."""
    means = {row: of[column].mean for row, of in entries.items() if of[column].values}
    if len(means) < 2:
        return []
    top = as_text((min if layout.lower_is_better else max)(means.values()), layout.metric)
    return [row for row, mean in means.items() if as_text(mean, layout.metric) == top]


def _axes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(axis for cell in cells for axis in cell.axes))


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
