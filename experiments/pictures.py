"""Draw the pictures of papers that the report of a sweep does not have: a map of a difference, and diagnostics of layers.

A definition asks for them in its table [experiment]: ``map = ["GN", "BN"]`` for the difference between two rows over the
two axes of the columns, and ``diagnostics = true`` for what ``diagnostics.csv`` of the runs has.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from fl_bn.app.palette import DIFFERENCE, line
from fl_bn.app.pictures import Picture
from fl_bn.app.report.layout import Layout

Curves = dict[str, dict[str, dict[int, float]]]  # quantity -> row -> round -> value


def further(layout: Layout, folder: Path) -> list[Picture]:
    """Return the pictures that the table [experiment] of a sweep asks for.

    Args:
        layout: The runs by row and column.
        folder: The folder of the sweep.
    """
    asked = tomllib.loads(layout.settings.text).get("experiment", {})
    pictures = []
    if "map" in asked and len(layout.rest) == 2:
        pictures.append(difference_map(layout, *asked["map"]))
    if asked.get("diagnostics") and (found := diagnostics(layout, folder)):
        caption = "Diagnostics over rounds: the median over layers; mean over seeds."
        pictures.append(Picture("diagnostics", caption, partial(_draw_curves, layout, found)))
    return pictures


def difference_map(layout: Layout, row: str, minus: str) -> Picture:
    """Make the map of the metric of one row minus that of another row, over the two axes of the columns."""
    x, y = layout.rest
    xs, ys = layout.values(x), layout.values(y)
    values = np.full((len(ys), len(xs)), np.nan)
    for (n, at_y), (m, at_x) in product(enumerate(ys), enumerate(xs)):
        cells = (layout.groups.get((name, f"{at_x}, {at_y}"), ()) for name in (row, minus))
        one, other = ({cell.config.get("seed"): layout.entry([cell]).mean for cell in of} for of in cells)
        differences = [value - other[seed] for seed, value in one.items() if seed in other]
        if known := [difference for difference in differences if np.isfinite(difference)]:
            values[n, m] = fmean(known)
    caption = f"{layout.title()}: {row} minus {minus}, in points, over {x} and {y}; mean over seeds."
    return Picture("map", caption, lambda: draw_map(values, xs, ys, x, y, f"{row} minus {minus} (points)"))


def draw_map(values: np.ndarray, xs: Sequence[str], ys: Sequence[str], x: str, y: str, bar: str, limit: float = np.inf) -> Figure:
    """Draw a map of differences, with a number on every square.

    Args:
        values: The differences, of shape (len(ys), len(xs)). NaN is shown as a dash.
        xs: The names of the columns.
        ys: The names of the rows.
        x: The label of the horizontal axis.
        y: The label of the vertical axis.
        bar: The label of the scale of colours.
        limit: All differences above ``limit`` have the same colour, and so have all differences below ``-limit``.
    """
    figure = Figure(figsize=(3 + 0.62 * len(xs), 1.4 + 0.36 * len(ys)), layout="constrained")
    axes = figure.subplots()
    most = min(limit, np.nanmax(np.abs(values), initial=1e-9))
    colours, norm = matplotlib.colormaps[DIFFERENCE], TwoSlopeNorm(0, -most, most)
    mesh = axes.pcolormesh(np.ma.masked_invalid(values), cmap=colours, norm=norm)
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        text = f"{value:+.1f}" if np.isfinite(value) else "–"
        colour = on(colours(norm(value))) if np.isfinite(value) else "black"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(np.arange(len(xs)) + 0.5, xs, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(np.arange(len(ys)) + 0.5, ys)
    axes.set(xlabel=x, ylabel=y)
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.colorbar(mesh, label=bar, extend="both" if np.nanmax(np.abs(values), initial=0.0) > most else "neither")
    return figure


def diagnostics(layout: Layout, folder: Path) -> Curves:
    """Read the diagnostics of the finished runs: quantity -> row and column -> round -> the mean over runs of the median over layers."""
    measured: dict[str, dict[str, dict[int, list[float]]]] = {}
    for place, cells in layout.groups.items():
        row = ", ".join(filter(None, place))
        for cell in cells:
            file = folder / "runs" / cell.name / "diagnostics.csv"
            if cell.finished and file.exists():
                for (quantity, round), values in _by_round(file).items():
                    measured.setdefault(quantity, {}).setdefault(row, {}).setdefault(round, []).append(median(values))
    return {
        quantity: {row: {round: fmean(values) for round, values in curve.items()} for row, curve in of.items()}
        for quantity, of in measured.items()
    }


def _by_round(file: Path) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    with file.open(newline="", encoding="utf-8") as source:
        for entry in csv.DictReader(source):
            if not entry["client"] and entry["value"]:  # not the lines of single clients
                found.setdefault((entry["quantity"], int(entry["round"])), []).append(float(entry["value"]))
    return found


def _draw_curves(layout: Layout, found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    figure = Figure(figsize=(4.2 * len(found) + 1.5, 3.0), layout="constrained")
    for axes, (quantity, of) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for row, curve in of.items():
            axes.plot(list(curve), list(curve.values()), **line(layout.rows.index(row)), label=row)
        axes.set(title=quantity, xlabel="round", yscale="log")
    axes.legend(fontsize=8)
    return figure


def on(rgba: Sequence[float]) -> str:
    """Return the colour of text that can be read on a background: ``black`` or ``white``.

    Args:
        rgba: Red, green and blue (0..1) of the background; further values are ignored.
    """
    red, green, blue = rgba[:3]
    return "black" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.179 else "white"
