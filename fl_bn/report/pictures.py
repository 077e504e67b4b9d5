"""Draw curves over the training, and the metric against an axis of the sweep."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter, NullLocator

from fl_bn.report.cells import Cell, scale
from fl_bn.report.layout import Entry, Layout, is_number
from fl_bn.report.settings import X, check_axis
from fl_bn.run.config import ConfigError
from fl_bn.run.palette import INK, STYLE, line

Array = np.ndarray
LOOK: Any = STYLE | {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": "#808080",
    "axes.titlesize": 9.5, "text.parse_math": False,
}  # fmt: skip
SIZE = (3.6, 2.8)  # inches: the width and height of a panel
LEGEND = 28  # the most letters in a line of the legend
LABELS = {
    "round": "round",
    "bytes": "sent and received per client",
    "exchanges": "exchanges with the server",
    "local-steps": "local steps per client",
}


@dataclass(frozen=True)
class Picture:
    """Hold a picture, which is drawn when it is needed.

    Attributes:
        name: The name of the file, without suffix.
        caption: The text below the picture.
        draw: The function that draws the picture.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]

    @cached_property
    def figure(self) -> Figure:
        """Return the figure, which is drawn once."""
        with matplotlib.rc_context(LOOK):
            return self.draw()

    @cached_property
    def png(self) -> bytes:
        """Return the content of the PNG file."""
        target = io.BytesIO()
        with matplotlib.rc_context(LOOK):
            self.figure.savefig(target, format="png", facecolor="white")
        return target.getvalue()


@dataclass(frozen=True)
class Series:
    """Hold the curve of the runs in one row and one column of the table.

    Attributes:
        row: The name of the row.
        column: The name of the column.
        rounds: The rounds in which every seed has a finite value.
        x: Quantity of ``X`` -> its mean over seeds after each round, of shape (rounds,). Unknown quantities are left out.
        mean: The mean over seeds, of shape (rounds,).
        std: The standard deviation over seeds, of shape (rounds,); 0 for one seed.
        seeds: The number of seeds.
        runs: The number of runs, with and without a result.
    """

    row: str
    column: str
    rounds: tuple[int, ...]
    x: Mapping[str, Array]
    mean: Array
    std: Array
    seeds: int
    runs: int


def series(layout: Layout, metric: str) -> list[Series]:
    """Return a curve for each row and column of the table that has finished runs with values of ``metric``."""
    made = (_series(layout, row, column, metric) for column in layout.columns for row in layout.rows)
    return [one for one in made if one is not None]


def _series(layout: Layout, row: str, column: str, metric: str) -> Series | None:
    """Return one curve; None: no round has a finite value of ``metric`` for every seed.

    A round in which any seed has no finite value is left out. With fewer seeds, the mean would jump there.
    """
    cells = [cell for cell in layout.finished(row, column) if cell.curve(metric)]
    curves = [cell.curve(metric) for cell in cells]
    first = curves[0] if curves else {}
    rounds = [r for r in first if all(math.isfinite(curve.get(r, math.nan)) for curve in curves)]
    if not rounds:
        return None
    values = np.array([[curve[r] for r in rounds] for curve in curves])
    std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    x = {quantity: way for quantity in X if (way := _way(cells, quantity, rounds)) is not None}
    return Series(row, column, tuple(rounds), x, values.mean(0), std, len(values), len(layout.groups[row, column]))


def _way(cells: Sequence[Cell], quantity: str, rounds: Sequence[int]) -> Array | None:
    """Return the mean position of the runs on a horizontal axis after each round; None: it is unknown for a run."""
    ways = [cell.travelled(quantity) for cell in cells]
    known = [[way[r] for r in rounds] for way in ways if way is not None]
    return np.array(known).mean(0) if len(known) == len(ways) else None


def curves(layout: Layout, available: Sequence[Series], x: str) -> Picture | None:
    """Make the picture of the metric over rounds, bytes, exchanges or local steps, with one panel per column.

    Args:
        layout: The rows and columns.
        available: The curves of the report.
        x: The quantity on the horizontal axis, one of ``X``.

    Returns:
        The picture; None: no curve has this quantity.
    """
    available = [one for one in available if x in one.x]
    if not available:
        return None
    caption = [f"{_capital(layout.title())} over {LABELS[x]}."]
    if any(one.seeds > 1 for one in available):
        caption.append("The band is one standard deviation over seeds.")
    fewer = [f"{one.row}, {one.column}: {one.seeds} of {one.runs}" for one in available if one.seeds < one.runs]
    if fewer:
        caption.append(f"Pale lines lack the runs without a result ({'; '.join(fewer)}).")

    def draw() -> Figure:
        columns = [column for column in layout.columns if any(one.column == column for one in available)]
        names = [layout.column_heading(column) for column in columns]
        with panels(layout, names) as (figure, every):
            for axes, column in zip(every, columns, strict=True):
                for one in available:
                    if one.column == column:
                        _curve(axes, one, x, layout.rows.index(one.row))
                _horizontal(axes, x, [one.x[x] for one in available])
        return figure

    return Picture(f"curves-{x}", " ".join(caption), draw)


def _curve(axes: Axes, one: Series, x: str, index: int) -> None:
    look = line(index)
    if one.seeds < one.runs:
        look["alpha"] = 0.4
    axes.plot(one.x[x], one.mean, **look, markevery=max(1, len(one.mean) // 7), label=one.row)
    if one.seeds > 1:
        axes.fill_between(one.x[x], one.mean - one.std, one.mean + one.std, color=look["color"], alpha=0.16, lw=0)


def _horizontal(axes: Axes, x: str, ways: Sequence[Array]) -> None:
    """Set up the horizontal axis of curves, which is logarithmic if one curve reaches ten times as far as another."""
    ends = [float(way[-1]) for way in ways]
    far = min(ends) > 0 and max(ends) / min(ends) >= 10 and min(float(way[0]) for way in ways) > 0
    if x != "round" and far:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif x != "bytes":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))
    if x == "bytes":
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_xlabel(LABELS[x])


def against(layout: Layout, axis: str) -> Picture:
    """Make the picture of the metric against a numeric axis of the sweep.

    There is one line per row, and one panel for every combination of values on the other axes.

    Raises:
        ConfigError: No run has the axis, or its values are not numbers.
    """
    check_axis(axis, "against", layout.axes)
    values = [value for value in layout.values(axis) if value != "–"]
    if not all(map(is_number, values)):
        raise ConfigError(f"[report] against needs an axis of numbers, but {axis} has {', '.join(values)}")
    row_axis = layout.row_axis if layout.row_axis != axis else ""
    others = [other for other in layout.rest if other != axis]
    entries: dict[str, dict[str, list[tuple[float, Entry]]]] = {}
    for key, of in layout.by(others, [cell for cell in layout.cells if axis in cell.axes]).items():
        for (row, value), cells in layout.by((row_axis, axis), of).items():
            if (entry := layout.entry(cells)).values:
                lines = entries.setdefault(layout.heading(others, key), {})
                lines.setdefault(row, []).append((float(value), entry))

    def draw() -> Figure:
        with panels(layout, list(entries)) as (figure, every):
            for axes, lines in zip(every, entries.values(), strict=True):
                for row, points in lines.items():
                    points = sorted(points, key=lambda point: point[0])
                    spread = [entry.std if len(entry.values) > 1 else 0.0 for _, entry in points]
                    look = line(layout.rows.index(row) if row in layout.rows else 0)
                    axes.errorbar([x for x, _ in points], [entry.mean for _, entry in points], spread, capsize=2.5, **look, label=row)
                axes.set_xlabel(axis)
                _ticks(axes, sorted(map(float, values)))
        return figure

    which = "best" if layout.settings.at == "best" else "last"
    caption = f"{_capital(layout.title())} ({which} round) against {axis}. Bars are one standard deviation over seeds."
    file = "".join(c if c.isalnum() or c in "-_" else "_" for c in axis)
    return Picture(f"against-{file}", caption, draw)


def _ticks(axes: Axes, values: Sequence[float]) -> None:
    """Put the horizontal ticks at ``values``, unless there are many. The axis is logarithmic if they span a factor of 20."""
    if values[0] > 0 and values[-1] / values[0] >= 20:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if len(values) <= 9:
        axes.set_xticks(values, [f"{value:g}" for value in values], rotation=0 if len(values) < 6 else 45)


@contextmanager
def panels(layout: Layout, names: Sequence[str]) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make a figure with several panels of the metric. When they are drawn, they get one range of values, and one legend.

    Args:
        layout: The rows and columns.
        names: The titles of the panels.

    Yields:
        The figure and its panels.
    """
    count = max(1, len(names))
    across = count if count <= 3 else min((3, 4, 2), key=lambda columns: -count % columns)
    down = -(-count // across)
    width, height = SIZE if count > 1 else (6.2, 4.0)
    legend = [_wrapped(row, LEGEND) for row in layout.rows]
    lines = sum(text.count("\n") + 1.3 for text in legend)
    size = (across * width + 2.6, max(down * height, 0.165 * lines + 0.4))
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(_wrapped(name, 36))
    for axes in grid[count:]:
        axes.set_visible(False)
    every = grid[:count]
    yield figure, every
    if scale(layout.metric) == 100:
        low, high = every[0].get_ylim()
        every[0].set_ylim(max(-1.0, low), min(101.0, high))
    for axes in every[::across]:
        axes.set_ylabel(_wrapped(layout.title(), 30))
    handles: dict[str, Any] = {}
    for axes in every:
        handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    rows = [row for row in layout.rows if row in handles]
    if rows:
        figure.legend([handles[row] for row in rows], [_wrapped(row, LEGEND) for row in rows], loc="outside right upper", fontsize=8)


def _wrapped(text: str, width: int) -> str:
    """Break ``text`` into lines of at most ``width`` letters, but not at hyphens."""
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False) or [text])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
