"""Draw curves over the training, and the metric against an axis of the sweep."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator

from fl_bn.app.config import ConfigError
from fl_bn.app.palette import line
from fl_bn.app.pictures import Picture, curve, log_scale, whole_ticks
from fl_bn.app.report.cells import scale
from fl_bn.app.report.layout import Layout, is_number
from fl_bn.app.report.settings import check_axis

Array = np.ndarray
SIZE = (3.6, 2.8)  # inches: the width and height of a panel
LEGEND = 28  # the most letters in a line of the legend
LABELS = {
    "round": "round",
    "bytes": "sent and received per client",
    "exchanges": "exchanges with the server",
    "local-steps": "local steps per client",
}


@dataclass(frozen=True)
class Series:
    """Hold one line of a picture, which shows the runs of a row.

    Attributes:
        x: The horizontal position of each point, of shape (points,).
        mean: The mean over seeds, of shape (points,).
        std: The standard deviation over seeds, of shape (points,); 0 for one seed.
        seeds: The number of seeds of a point, at least.
        runs: The number of runs of a point, with and without a result.
    """

    row: str
    panel: str
    x: Array
    mean: Array
    std: Array
    seeds: int
    runs: int


def series(layout: Layout, x: str) -> list[Series]:
    """Return a line over ``x``, one of ``X``, for each row and column with finished runs.

    Those without values of the metric, or for which ``x`` is unknown, have none.
    """
    made = (_series(layout, row, column, x) for column in layout.columns for row in layout.rows)
    return [one for one in made if one is not None]


def _series(layout: Layout, row: str, column: str, x: str) -> Series | None:
    """Return one line; None: no round has a finite value for every seed.

    Other rounds are left out, since the mean over fewer seeds would jump there.
    """
    cells = [cell for cell in layout.finished(row, column) if cell.curve(layout.metric)]
    curves = [cell.curve(layout.metric) for cell in cells]
    rounds = [r for r in (curves[0] if curves else ()) if all(math.isfinite(curve.get(r, math.nan)) for curve in curves)]
    ways = [way for cell in cells if (way := cell.travelled(x)) is not None]
    if not rounds or len(ways) < len(cells):
        return None
    positions, values = (np.array([[of[r] for r in rounds] for of in every]) for every in (ways, curves))
    std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
    runs = len(layout.groups[row, column])
    return Series(row, layout.column_heading(column), positions.mean(0), values.mean(0), std, len(values), runs)


def curves(layout: Layout, x: str) -> Picture | None:
    """Make the picture of the metric over ``x``, one of ``X``, with one panel per column, if known."""
    lines = series(layout, x)
    return _picture(layout, f"curves-{x}", f"over {LABELS[x]}", lines, partial(_horizontal, x, [one.x for one in lines])) if lines else None


def against(layout: Layout, axis: str) -> Picture:
    """Make the picture of the metric against a numeric axis of the sweep.

    There is one line per row, and one panel for every combination of values on the
    other axes. ``ConfigError``: no run has the axis, or its values are not numbers.
    """
    check_axis(axis, "against", layout.axes)
    values = [value for value in layout.values(axis) if value != "–"]
    if not all(map(is_number, values)):
        raise ConfigError(f"[report] against needs an axis of numbers, but {axis} has {', '.join(values)}")
    row_axis = layout.row_axis if layout.row_axis != axis else ""
    others = [other for other in layout.rest if other != axis]
    lines = []
    for key, of in layout.by(others, [cell for cell in layout.cells if axis in cell.axes]).items():
        for (row,), cells in layout.by((row_axis,), of).items():
            entries = {float(value): layout.entry(same) for (value,), same in layout.by((axis,), cells).items()}
            points = [(x, entries[x]) for x in sorted(entries) if entries[x].values]
            if points:
                x, mean, std = np.array([(x, entry.mean, entry.std) for x, entry in points]).T
                seeds, runs = min(len(entry.values) for _, entry in points), max(entry.runs for _, entry in points)
                lines.append(Series(row, layout.heading(others, key), x, mean, np.nan_to_num(std), seeds, runs))
    which = "best" if layout.settings.at == "best" else "last"
    file = "".join(c if c.isalnum() or c in "-_" else "_" for c in axis)
    ticks = partial(_ticks, axis, sorted(map(float, values)))
    return _picture(layout, f"against-{file}", f"({which} round) against {axis}", lines, ticks)


def _picture(layout: Layout, name: str, over: str, lines: Sequence[Series], set_up: Callable[[Axes], None]) -> Picture:
    """Make a picture of lines in panels, whose horizontal axis (``over``) ``set_up`` sets up."""
    caption = [f"{layout.title()[:1].upper()}{layout.title()[1:]} {over}."]
    if any(one.seeds > 1 for one in lines):
        caption.append("The band is one standard deviation over seeds.")
    if fewer := [f"{one.row}, {one.panel}: {one.seeds} of {one.runs}" for one in lines if one.seeds < one.runs]:
        caption.append(f"Pale lines lack the runs without a result ({'; '.join(fewer)}).")

    def draw() -> Figure:
        titles = list(dict.fromkeys(one.panel for one in lines))
        with panels(layout, titles) as (figure, every):
            for axes, title in zip(every, titles, strict=True):
                for one in lines:
                    if one.panel == title:
                        _line(axes, one, layout.rows.index(one.row) if one.row in layout.rows else 0)
                set_up(axes)
        return figure

    return Picture(name, " ".join(caption), draw)


def _line(axes: Axes, one: Series, index: int) -> None:
    look = line(index) | {"label": one.row, "markevery": max(1, len(one.mean) // 7), "alpha": 0.4 if one.seeds < one.runs else 1.0}
    band = (one.mean - one.std, one.mean + one.std) if one.seeds > 1 else ()
    curve(axes, one.x, one.mean, *band, **look)


def _horizontal(x: str, ways: Sequence[Array], axes: Axes) -> None:
    """Set up the axis of curves, logarithmic if one reaches ten times as far as another."""
    ends = [float(way[-1]) for way in ways]
    far = min(ends) > 0 and max(ends) / min(ends) >= 10 and min(float(way[0]) for way in ways) > 0
    if x != "round" and far:
        log_scale(axes, "x")
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif x != "bytes":
        whole_ticks(axes, 6)
    if x == "bytes":
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_xlabel(LABELS[x])


def _ticks(label: str, values: Sequence[float], axes: Axes) -> None:
    """Put the ticks at ``values``, unless there are many; logarithmic from a factor of 20 on."""
    if values[0] > 0 and values[-1] / values[0] >= 20:
        log_scale(axes, "x")
        axes.xaxis.set_minor_locator(NullLocator())
    if len(values) <= 9:
        axes.set_xticks(values, [f"{value:g}" for value in values], rotation=0 if len(values) < 6 else 45)
    axes.set_xlabel(label)


@contextmanager
def panels(layout: Layout, names: Sequence[str]) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make a figure with several panels of the metric, with one range of values and one legend."""
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
