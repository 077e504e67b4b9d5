"""Place the runs of a sweep in rows and columns, and make the table of results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from fl_bn.report.cells import GIGABYTES, MEGABYTES, Cell, scale, title
from fl_bn.report.settings import SEED, Settings, check_axis
from fl_bn.task import CLASSIFICATION

NOT_RUN, LEFT_OUT = "not run", "left out"  # texts in entries without runs; LEFT_OUT: the sweep file skips the combination


@dataclass(frozen=True)
class Entry:
    """Hold one entry of the table.

    Attributes:
        values: The finite values, one per seed.
        runs: The number of seeds that were run, with and without a value.
        instead: The text that the table shows if there is no value.
        paper: The number that the paper prints; empty: the paper has no number for this entry.
    """

    values: tuple[float, ...] = ()
    runs: int = 0
    instead: str = NOT_RUN
    paper: str = ""

    @property
    def mean(self) -> float:
        """Return the mean over seeds; NaN: there is no value."""
        return fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float:
        """Return the sample standard deviation over seeds; NaN for fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Problem:
    """Hold a run that the table leaves out, and the reason."""

    cell: Cell
    why: str


@dataclass(frozen=True)
class Layout:
    """Hold the runs of a sweep by row and column.

    Attributes:
        settings: The settings of the report.
        cells: The runs that can be read.
        row_axis: The axis of the rows.
        rest: The axes of the columns. A column is one combination of values on these axes.
        rows: The names of the rows.
        columns: The names of the columns.
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
        """Return the name of ``metric``, or of the table's metric, with the samples of the evaluation if all runs have the same ones."""
        splits = {cell.split for cell in self.cells}
        return title(metric or self.metric, splits.pop() if len(splits) == 1 else "")

    @property
    def lower_is_better(self) -> bool:
        """Return whether a lower value of the metric is better."""
        return any(cell.lower_is_better(self.metric) for cell in self.cells)

    def finished(self, row: str, column: str) -> list[Cell]:
        """Return the finished runs in a row and a column."""
        return [cell for cell in self.groups.get((row, column), ()) if cell.finished]

    def numeric(self, axis: str) -> bool:
        """Return whether all values on ``axis`` are numbers."""
        return all(_is_number(cell.at(axis)) for cell in self.cells if axis in cell.axes)

    def heading(self, axes: Sequence[str], values: Sequence[str]) -> str:
        """Return the heading of a panel for the runs with ``values`` on ``axes``.

        A number, ``true`` or ``false`` is written after the name of its axis. A dash, the value of runs without the axis,
        becomes ``no AXIS``.
        """
        bare = [_is_number(value) or value in ("true", "false") for value in values]
        parts = [
            f"no {axis}" if value == "–" else f"{axis} {value}" if plain else value
            for axis, value, plain in zip(axes, values, bare, strict=True)
        ]
        return ", ".join(parts)

    def column_heading(self, column: str) -> str:
        """Return the heading of a column; empty: there is only one column."""
        of = next(cells[0] for (_, c), cells in self.groups.items() if c == column)
        return self.heading(self.rest, [of.at(axis) for axis in self.rest]) if self.rest else ""

    def entry(self, cells: Sequence[Cell]) -> Entry:
        """Return the entry of ``cells``, which are runs that differ only in the seed."""
        values = [point[1] for cell in cells if cell.finished and (point := cell.measurement(self.metric, self.settings.at)) is not None]
        kept = tuple(value for value in values if math.isfinite(value))
        instead = "not finite" if values else "not measured" if any(c.finished for c in cells) else cells[0].status if cells else NOT_RUN
        return Entry(kept, len(cells), instead)

    def worst(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return those of ``cells`` with the value on the axis ``settings.worst`` under which the metric is worst on average.

        Values without a finite metric count last.
        """
        sign = -1 if self.lower_is_better else 1
        groups = self.by((self.settings.worst,), cells).values()
        return min(groups, key=lambda group: sign * mean if math.isfinite(mean := self.entry(group).mean) else math.inf)

    def by(self, axes: Sequence[str], cells: Sequence[Cell] | None = None) -> dict[tuple[str, ...], list[Cell]]:
        """Group runs by their values on ``axes``, in the order of the sweep file.

        Args:
            axes: The axes.
            cells: The runs; None: all runs that can be read.
        """
        groups: dict[tuple[str, ...], list[Cell]] = {}
        cells = self.cells if cells is None else cells
        places = {axis: {value: n for n, value in enumerate(self.values(axis, cells))} for axis in axes}
        for cell in cells:
            groups.setdefault(tuple(cell.at(axis) for axis in axes), []).append(cell)
        return {key: groups[key] for key in sorted(groups, key=lambda key: [places[a][v] for a, v in zip(axes, key, strict=True)])}

    def leaves_out(self, row: str, column: str) -> bool:
        """Return whether the sweep file skips the combinations in ``row`` and ``column``."""
        of = [cell for (_, there), cells in self.groups.items() if there == column for cell in cells]
        where = {axis: of[0].at(axis) for axis in _axes(of) if len(self.values(axis, of)) == 1}
        return self.settings.leaves_out({**where, self.row_axis: row})

    def values(self, axis: str, cells: Sequence[Cell] | None = None) -> list[str]:
        """Return the values of ``cells`` (None: of all readable runs) on ``axis``, in the order of the sweep file."""
        return _values(axis, self.cells if cells is None else cells, self.settings)

    def check(self, axis: str, what: str) -> None:
        """Check that at least one run has ``axis``.

        Args:
            axis: The axis that [report] names.
            what: The key of [report] that names the axis.

        Raises:
            ConfigError: No run has this axis.
        """
        check_axis(axis, what, _axes(self.cells))


@dataclass(frozen=True)
class Table:
    """Hold the table of results.

    Attributes:
        layout: The runs by row and column.
        entries: The entry of each row and column, in percent if the metric is a share.
        best: The (row, column) of the best entries of each column.
        problems: The runs that the table leaves out.
        elsewhere: The paper's numbers, as text, whose row or column is not in the table.
        corner: The heading above the names of the rows.
    """

    layout: Layout
    entries: Mapping[str, Mapping[str, Entry]]
    best: frozenset[tuple[str, str]]
    problems: tuple[Problem, ...] = ()
    elsewhere: tuple[str, ...] = ()
    corner: str = field(default="")

    @property
    def has_paper(self) -> bool:
        """Return whether at least one entry has a number of the paper."""
        return any(entry.paper for row in self.entries.values() for entry in row.values())

    @property
    def caption(self) -> str:
        """Return the caption. It names the metric and its round, and the number of seeds in each mean."""
        at = "best round, chosen by this very number" if self.layout.settings.at == "best" else "last round"
        at += f", under the worst {worst}" if (worst := self.layout.settings.worst) else ""
        of = f"mean (standard deviation) over {self.seeds} seeds" if self.seeds > 1 else "one seed"
        of += "" if self.same_runs else " where nothing else is said"
        paper = f"; in brackets: {self.layout.settings.paper.source or 'the paper'}" if self.has_paper else ""
        name = self.layout.title()
        return f"{name[:1].upper()}{name[1:]}, {at}: {of}{paper}."

    @property
    def seeds(self) -> int:
        """Return the most frequent number of seeds among the entries; 0: no entry has a value."""
        return Counter(len(entry.values) for entry in self._filled).most_common(1)[0][0] if self._filled else 0

    @property
    def same_runs(self) -> bool:
        """Return whether all entries with a value have the same number of seeds, and a value for each seed."""
        return all(len(entry.values) == self.seeds == entry.runs for entry in self._filled)

    @property
    def _filled(self) -> list[Entry]:
        return [entry for row in self.entries.values() for entry in row.values() if entry.values]


def lay_out(settings: Settings, cells: Sequence[Cell]) -> Layout:
    """Place the runs in rows and columns.

    An axis with several values becomes columns even if the sweep file's [report] does not name it. So only runs that differ
    in nothing but the seed are averaged.

    Raises:
        ConfigError: [report] names an axis that no run has.
    """
    readable = [cell for cell in cells if cell.status != "unreadable"]
    settings = replace(settings, metric=settings.metric or next((cell.metric for cell in readable if cell.rows), CLASSIFICATION.metric))
    axes = [axis for axis in _axes(readable) if axis != SEED]
    row_axis = settings.rows or ("method" if "method" in axes else axes[0] if axes else "")
    for what, names in (("rows", (settings.rows,)), ("columns", settings.columns or ()), ("worst", (settings.worst,))):
        for name in filter(None, names):
            check_axis(name, what, axes)
    named = [axis for axis in settings.columns or () if axis not in (row_axis, settings.worst)]
    others = [axis for axis in axes if axis not in (row_axis, settings.worst, *named)]
    rest = (*named, *(axis for axis in others if settings.columns is None or len(_values(axis, readable, settings)) > 1))
    layout = Layout(settings, tuple(readable), row_axis, rest, (), (), {})
    groups: dict[tuple[str, str], tuple[Cell, ...]] = {}
    columns: dict[str, None] = {}
    for key, of in layout.by(rest).items():
        column = ", ".join(key) or settings.metric
        columns[column] = None
        for (row,), runs in layout.by((row_axis,), of).items():
            runs = layout.worst(runs) if settings.worst else runs
            groups[row, column] = tuple(sorted(runs, key=lambda cell: (len(cell.at(SEED)), cell.at(SEED))))
    return Layout(settings, layout.cells, row_axis, rest, tuple(layout.values(row_axis)), tuple(columns), groups)


def tabulate(layout: Layout, cells: Sequence[Cell]) -> Table:
    """Make the table of results.

    Args:
        layout: The runs by row and column.
        cells: All runs, for the list of problems. Runs that cannot be read are included.
    """
    numbers = layout.settings.paper.numbers
    entries: dict[str, dict[str, Entry]] = {}
    for row in layout.rows:
        for column in layout.columns:
            made = layout.entry(layout.groups.get((row, column), ()))
            instead = LEFT_OUT if not made.runs and layout.leaves_out(row, column) else made.instead
            paper = numbers.get(row, {}).get(column, "")
            entries.setdefault(row, {})[column] = replace(made, instead=instead, paper=paper)
    best = {(row, column) for column in layout.columns for row in _best(entries, column, layout)}
    elsewhere = tuple(
        f"{row}, {column}: {number}"
        for row, of in numbers.items()
        for column, number in of.items()
        if row not in layout.rows or column not in layout.columns
    )
    problems = tuple(Problem(cell, why) for cell in cells if (why := _wrong(cell, layout.metric, layout.settings.at)))
    corner = " \\ ".join(part for part in (layout.row_axis, ", ".join(layout.rest)) if part)
    return Table(layout, entries, frozenset(best), problems, elsewhere, corner)


def as_text(value: float, metric: str) -> str:
    """Format a value of ``metric`` for the table; a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if metric in (MEGABYTES, GIGABYTES):
        return f"{value:.4f}"
    return f"{value:.1f}" if scale(metric) == 100 else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _wrong(cell: Cell, metric: str, at: str) -> str:
    if not cell.finished:
        return cell.error or f"{cell.status} after {len(cell.rows)} of {cell.config.get('rounds', '?')} rounds"
    point = cell.measurement(metric, at)
    if point is None:
        return f"{metric} was not measured"
    return "" if math.isfinite(point[1]) else f"{metric} was not a finite number in round {point[0]}"


def _best(entries: Mapping[str, Mapping[str, Entry]], column: str, layout: Layout) -> list[str]:
    """Return the rows with the best number in a column; an empty list if there are fewer than two rows to compare.

    Rows that [report] lists under ``apart`` do not count.
    """
    means = {row: of[column].mean for row, of in entries.items() if of[column].values and row not in layout.settings.apart}
    if len(means) < 2:
        return []
    top = as_text((min if layout.lower_is_better else max)(means.values()), layout.metric)
    return [row for row, mean in means.items() if as_text(mean, layout.metric) == top]


def _values(axis: str, cells: Sequence[Cell], settings: Settings) -> list[str]:
    """Return the values on an axis: first the values in the sweep file, in its order, then other values (numbers by size)."""
    values = list(dict.fromkeys(cell.at(axis) for cell in cells))
    listed = [value for value in settings.order.get(axis, ()) if value in values]
    others = [value for value in values if value not in listed]
    numbers = all(_is_number(value) for value in others)
    return [*listed, *(sorted(others, key=float) if numbers else others)]


def _axes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(axis for cell in cells for axis in cell.axes))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
