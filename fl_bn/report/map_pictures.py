"""Draw heat maps over two axes, the accuracy of each class, and box plots of the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from fl_bn.report.cells import Cell, scale
from fl_bn.report.layout import Layout, as_text
from fl_bn.report.pictures import Picture, first_of_lines, panels, wrapped
from fl_bn.report.settings import Heat
from fl_bn.run.config import ConfigError
from fl_bn.run.palette import DIFFERENCE, INK, MAP, colour, on
from fl_bn.run.pictures import which_end
from fl_bn.task import CLASSIFICATION

NUMBERS = 16  # a map with more columns than this has no numbers written in, since they could not be read
FRAMED: Any = {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}


def heat(layout: Layout, wanted: Heat) -> Picture:
    """Make heat maps of the metric over two axes, or of the difference between the metrics of two rows.

    Args:
        layout: The runs by row and column.
        wanted: The axes, and the rows to show.

    Raises:
        ConfigError: No run has such an axis or row, or a row is wanted although x or y is the axis of the rows.
    """
    for axis in (wanted.x, wanted.y):
        layout.check(axis, "heat")
    fixed = [value for value in (wanted.value, wanted.minus) if value]
    if fixed and layout.row_axis in (wanted.x, wanted.y):
        raise ConfigError(
            f"[report] heat: x or y is {layout.row_axis!r}, the axis of the rows, so value={fixed[0]!r} cannot choose a row of it: "
            "leave out value and minus, or choose other axes"
        )
    for value in fixed:
        if value not in layout.rows:
            raise ConfigError(f"[report] heat names the row {value!r}, but there is no such row: the rows are {', '.join(layout.rows)}")
    others = [a for a in (layout.row_axis, *layout.rest) if a not in (wanted.x, wanted.y) and not (fixed and a == layout.row_axis)]
    xs, ys = layout.values(wanted.x), layout.values(wanted.y)
    maps: dict[str, np.ndarray] = {}
    for key, cells in layout.by(others).items():
        values = _map(layout, wanted, [c for c in cells if not fixed or c.at(layout.row_axis) == wanted.value], xs, ys)
        if wanted.minus:
            values = values - _map(layout, wanted, [c for c in cells if c.at(layout.row_axis) == wanted.minus], xs, ys)
        maps[layout.heading(others, key)] = values
    unit = "percentage points" if scale(layout.metric) == 100 else layout.metric
    what = f"{layout.title()}, {'best' if layout.settings.at == 'best' else 'last'} round"
    of = f"{wanted.value} minus {wanted.minus} ({unit})" if wanted.minus else wanted.value
    caption = f"{what[:1].upper()}{what[1:]}{': ' + of if of else ''}, over {wanted.x} and {wanted.y}; mean over seeds."
    bar = unit if wanted.minus else layout.title()

    def draw() -> Figure:
        x, y = (_axis_name(layout, axis) for axis in (wanted.x, wanted.y))
        return draw_maps(maps, xs, ys, x, y, bar, layout.metric, difference=bool(wanted.minus))

    return Picture("heat", caption, f"Heat map. {caption} {_in_words(maps, xs, ys, layout.metric)}", draw)


def _axis_name(layout: Layout, axis: str) -> str:
    """Return the label of an axis. For an axis of ``partition-parameter``, the label says at which end the data are IID."""
    by_value = {cell.at(axis): cell.config for cell in layout.cells if axis in cell.axes and cell.config}
    configs = [by_value[value] for value in layout.values(axis) if value in by_value]
    kinds = {str(config.get("partition", "")) for config in configs}
    values = [float(config.get("partition-parameter", 0.0)) for config in configs]
    monotonic = values in (sorted(values), sorted(values, reverse=True))
    if len(kinds) != 1 or len(set(values)) < 2 or not monotonic:
        return axis
    end = which_end(kinds.pop(), values)
    return end if "IID" in end else axis


def _map(layout: Layout, wanted: Heat, cells: Sequence[Cell], xs: Sequence[str], ys: Sequence[str]) -> np.ndarray:
    values = np.full((len(ys), len(xs)), np.nan)
    for (x, y), runs in layout.by((wanted.x, wanted.y), cells).items():
        values[ys.index(y), xs.index(x)] = layout.entry(runs).mean
    return values


def _in_words(maps: Mapping[str, np.ndarray], xs: Sequence[str], ys: Sequence[str], metric: str) -> str:
    lines = []
    for name, values in maps.items():
        for y, row in zip(ys, values, strict=True):
            lines.append(
                f"{name + ', ' if name else ''}{y}: " + ", ".join(f"{as_text(v, metric)} at {x}" for x, v in zip(xs, row, strict=True))
            )
    return "; ".join(lines) + "."


def draw_maps(
    maps: Mapping[str, np.ndarray],
    xs: Sequence[str],
    ys: Sequence[str],
    x: str,
    y: str,
    bar: str,
    metric: str,
    *,
    difference: bool = False,
    limit: float = np.inf,
) -> Figure:
    """Draw heat maps side by side, with one scale of colours for all.

    Args:
        maps: Title of a map -> its values, of shape (len(ys), len(xs)). NaN is shown as a dash.
        xs: The names of the columns.
        ys: The names of the rows.
        x: The label of the horizontal axis.
        y: The label of the vertical axis.
        bar: The label of the scale of colours.
        metric: The metric, for the format of the numbers.
        difference: Whether the values are differences, which may be negative.
        limit: All differences above ``limit`` have the same colour, and so have all differences below ``-limit``.
    """
    cell, most = (0.62 if len(xs) <= NUMBERS else 0.2), max(1, min(3, int(11 / (1.4 + 0.62 * min(len(xs), NUMBERS)))))
    room = min(2.4, 0.075 * max(map(len, ys), default=1)) if most == 1 else 0.8
    size = (0.7 + room + cell * max(3, len(xs)), 0.95 + 0.36 * max(2, len(ys)))
    every = np.concatenate([values.ravel() for values in maps.values()]) if maps else np.zeros(0)
    every = every[np.isfinite(every)]
    with matplotlib.rc_context(FRAMED), panels(list(maps), size=size, across=most) as (figure, panel):
        colours = matplotlib.colormaps[DIFFERENCE if difference else MAP]
        norm = _norm(every, difference, limit)
        for axes, values in zip(panel, maps.values(), strict=True):
            mesh = axes.pcolormesh(np.ma.masked_invalid(values), cmap=colours, norm=norm, edgecolor="face", lw=0.2)
            for row, column in np.ndindex(values.shape) if len(xs) <= NUMBERS else ():
                _number(axes, row, column, float(values[row, column]), colours, norm, metric, difference)
            step = max(1, len(xs) // 20)
            turned = max((len(name) for name in xs), default=0) > 6
            names = [wrapped(name, 24 if turned else 16) for name in xs[::step]]  # three turned lines would lie on each other
            axes.set_xticks(np.arange(0, len(xs), step) + 0.5, names, rotation=40 if turned else 0)
            if turned:
                for tick in axes.get_xticklabels():
                    tick.set(ha="right", rotation_mode="anchor")
            axes.set_yticks(np.arange(len(ys)) + 0.5, [wrapped(name, 30) for name in ys])
            axes.set(xlabel=x, ylabel=y)
            axes.invert_yaxis()
            axes.tick_params(length=0)
        if maps and len(every):
            beyond = difference and float(np.abs(every).max()) > limit
            figure.colorbar(mesh, ax=panel, label=bar, fraction=0.06, extend="both" if beyond else "neither")
    return figure


def _norm(values: np.ndarray, difference: bool, limit: float) -> Normalize:
    if difference:
        most = min(limit, max(1e-9, float(np.abs(values).max()))) if len(values) else 1.0
        return TwoSlopeNorm(0, -most, most)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return Normalize(low, high if high > low else low + 1)


def _number(axes: Axes, row: int, column: int, value: float, colours: Any, norm: Normalize, metric: str, difference: bool) -> None:
    """Write a number on a square of a map, in black or white, so that it can be read on the colour of the square.

    A ``difference`` above 0 gets a plus sign. A number that is not finite becomes a dash.
    """
    if not np.isfinite(value):
        axes.text(column + 0.5, row + 0.5, "–", ha="center", va="center", color=INK)
        return
    text = as_text(value, metric)
    axes.text(
        column + 0.5, row + 0.5, f"+{text}" if difference and value > 0 else text, ha="center", va="center", fontsize=8,
        color=on(colours(norm(value))),
    )  # fmt: skip


def per_class(layout: Layout) -> Picture | None:
    """Make a heat map for each column, with the accuracy of each row and class in the last evaluation.

    None: no run has accuracies per class.
    """
    by_column: dict[str, dict[str, np.ndarray]] = {}
    for column in layout.columns:
        for row in layout.rows:
            values = [of for cell in layout.finished(row, column) if (of := cell.per_class())]
            if values and len({len(of) for of in values}) == 1:
                by_column.setdefault(column, {})[row] = np.array(values).mean(0)
    if not by_column:
        return None
    rows = [row for row in layout.rows if any(row in of for of in by_column.values())]
    classes = max(len(of) for by_row in by_column.values() for of in by_row.values())
    maps = {}
    for column, by_row in by_column.items():
        map = np.full((len(rows), classes), np.nan)
        for row, values_of in by_row.items():
            map[rows.index(row), : len(values_of)] = values_of
        maps[layout.column_heading(column)] = map
    xs = [str(number) for number in range(classes)]
    caption = "Accuracy of each class in the last evaluation (%); mean over seeds."
    return Picture(
        "per-class", caption, f"Heat map. {caption} {_in_words(maps, xs, rows, 'accuracy') if classes <= NUMBERS else ''}",
        lambda: draw_maps(maps, xs, rows, "class", layout.row_axis, "accuracy (%)", "accuracy"),
    )  # fmt: skip


def boxplot(layout: Layout) -> Picture | None:
    """Make box plots of the task's metric at the clients in the last evaluation, with all seeds together.

    None: no run has the metric of each client.
    """
    metric = next((cell.metric for cell in layout.cells if cell.rows), layout.metric)
    name, share = metric.replace("-", " "), scale(metric) == 100
    by_column: dict[str, dict[str, list[float]]] = {}
    for column in layout.columns:
        for row in layout.rows:
            if values := [value for cell in layout.finished(row, column) for value in cell.of_clients(metric)]:
                by_column.setdefault(column, {})[row] = values
    if not by_column:
        return None
    rows = [row for row in layout.rows if any(row in of for of in by_column.values())]

    def draw() -> Figure:
        size = (3.9, 0.95 + 0.36 * max(3, len(rows)))
        with panels([layout.column_heading(column) for column in by_column], size=size) as (figure, every):
            for axes, of in zip(every, by_column.values(), strict=True):
                _boxes(axes, of, rows, layout)
                axes.set_xlabel(f"{name} of a client{' (%)' if share else ''}")
                named = axes in first_of_lines(every)
                axes.set_yticks(range(len(rows)), [wrapped(row, 26) if named else "" for row in rows])
            low = min(axes.get_xlim()[0] for axes in every)
            for axes in every:
                axes.set(xlim=(max(-2, low), 102) if share else None, ylim=(len(rows) - 0.4, -0.6))
        return figure

    middle = "; ".join(
        f"{row}{f' ({column})' if layout.rest else ''} {as_text(np.median(v), metric)} "
        f"({as_text(min(v), metric)} to {as_text(max(v), metric)})"
        for column, of in by_column.items()
        for row, v in of.items()
    )
    what = "Accuracies" if metric == CLASSIFICATION.metric else f"{name[:1].upper()}{name[1:]}"
    caption = f"{what} of the clients in the last evaluation, all seeds: quartiles, a point per client."
    return Picture("boxplot", caption, f"Box plots. {caption} Medians (range): {middle}.", draw)


def _boxes(axes: Axes, of: Mapping[str, Sequence[float]], rows: Sequence[str], layout: Layout) -> None:
    for place, row in enumerate(rows):
        if row not in of:
            continue
        shade = colour(layout.rows.index(row))
        values = np.array(of[row])
        apart = 0.28 * ((np.arange(len(values)) * 0.618) % 1 - 0.5)  # moves points a little, so that equal ones do not hide each other
        axes.scatter(values, place + apart, s=7, color=shade, alpha=0.55, lw=0)
        ink = {"color": INK, "lw": 1.1}
        axes.boxplot(
            [values], positions=[place], orientation="horizontal", widths=0.6, showfliers=False, boxprops=ink, whiskerprops=ink,
            capprops=ink, medianprops={"color": INK, "lw": 2.2},
        )  # fmt: skip
