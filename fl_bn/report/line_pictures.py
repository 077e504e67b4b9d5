"""Draw pictures with lines: curves over the training, the metric against an axis, drift, and diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from fl_bn.report.cells import scale
from fl_bn.report.curves import Series, series
from fl_bn.report.layout import Entry, Layout, as_text
from fl_bn.report.pictures import (
    Picture,
    columns_of,
    first_of_lines,
    in_words,
    legend,
    logarithmic,
    panels,
    percent_limits,
    same_limits,
    wrapped,
)
from fl_bn.run.config import ConfigError
from fl_bn.run.palette import line

LABELS = {
    "round": "round",
    "bytes": "sent and received per client",
    "exchanges": "exchanges with the server",
    "local-steps": "local steps per client",
}
BAND = "The band is one standard deviation over seeds."


def curves(layout: Layout, available: Sequence[Series], x: str) -> Picture | None:
    """Make the picture of the metric over rounds, bytes, exchanges or local steps.

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

    def draw() -> Figure:
        return _panels_of(layout, {layout.metric: available}, x)

    words = in_words({f"{one.row} ({one.column})" if layout.rest else one.row: as_text(one.mean[-1], layout.metric) for one in available})
    counted = " One exchange per round, and one for each layer-wise average." if x == "exchanges" else ""
    over = {"round": "rounds", "bytes": "bytes sent and received per client"}.get(x, LABELS[x])
    caption = f"{_capital(layout.title())} over {over}.{_band(available)}{counted}"
    return Picture(f"curves-{x}", caption, f"Lines: {layout.title()} over {over}. Last values: {words}.", draw)


def drift(layout: Layout) -> Picture | None:
    """Make the picture of the running statistics' drift and smallest variance over rounds; None: no run has either."""
    by_metric = {metric: of for metric in ("drift", "min-var") if (of := series(layout, metric))}
    if not by_metric:
        return None
    every = [one for of in by_metric.values() for one in of]
    alt = f"Lines over rounds: {' and '.join(map(layout.title, by_metric))}, of {', '.join(dict.fromkeys(one.row for one in every))}."
    caption = f"Drift of the running statistics over rounds: {' and '.join(map(layout.title, by_metric))}.{_band(every)}"
    return Picture("drift", caption, alt, lambda: _panels_of(layout, by_metric, "round"))


def _panels_of(layout: Layout, by_metric: Mapping[str, Sequence[Series]], x: str) -> Figure:
    columns = [column for column in layout.columns if any(one.column == column for of in by_metric.values() for one in of)]
    rows = [row for row in layout.rows if any(one.row == row for of in by_metric.values() for one in of)]
    most = len(columns) if len(columns) <= 4 and len(by_metric) > 1 else columns_of(len(columns))
    headings = [layout.column_heading(column) for column in columns]
    names = [name for _ in by_metric for name in [*headings, *([None] * (-len(columns) % most if len(by_metric) > 1 else 0))]]
    texts = _ranked(next(iter(by_metric.values())), layout) if len(names) == 1 else {row: row for row in rows}
    with panels(names, list(texts.values()), (5.4, 2.5) if most == 1 and len(by_metric) > 1 else None, most) as (figure, every):
        for n, (metric, of) in enumerate(by_metric.items()):
            panel = every[n * len(columns) : (n + 1) * len(columns)]
            for axes, column in zip(panel, columns, strict=True):
                for one in (one for one in of if one.column == column):
                    _curve(axes, one, x, layout.rows.index(one.row), metric)
                _across(axes, x, [one.x[x] for one in of])
            same = percent_limits if scale(metric) == 100 else same_limits
            same(panel)
            for axes in first_of_lines(panel):
                axes.set_ylabel(wrapped(layout.title(metric), 24))
        legend(figure, every, texts)
    return figure


def _curve(axes: Axes, one: Series, x: str, index: int, metric: str) -> None:
    look, points = line(index) | ({"alpha": 0.4} if one.seeds < one.runs else {}), len(one.mean)
    every = max(1, points // 7)
    axes.plot(one.x[x], one.mean, **look, markevery=(index % every if points > 14 else 0, every), label=one.row)
    if one.seeds > 1:
        low = one.mean - one.std
        if metric in ("drift", "min-var"):  # a band on a logarithmic axis must not reach below 0
            low = np.maximum(low, one.mean / 10)
        axes.fill_between(one.x[x], low, one.mean + one.std, color=look["color"], alpha=0.16, lw=0)
    if metric in ("drift", "min-var") and (one.mean > 0).all():
        logarithmic(axes)


def _ranked(available: Sequence[Series], layout: Layout) -> dict[str, str]:
    """Return the texts of the legend by row, the best first: the name of the row and its last value."""
    metric = layout.metric
    ranked = sorted(available, key=lambda one: one.mean[-1] if layout.lower_is_better else -one.mean[-1])
    spread = [f" ± {as_text(one.std[-1], metric)}" if one.seeds > 1 else "" for one in ranked]
    return {one.row: f"{one.row}: {as_text(one.mean[-1], metric)}{of}" for one, of in zip(ranked, spread, strict=True)}


def _across(axes: Axes, x: str, ways: Sequence[np.ndarray]) -> None:
    """Set up the horizontal axis.

    The axis is logarithmic if all positions are above 0 and the longest curve reaches at least ten times as far as the
    shortest. An axis of rounds is never logarithmic. Bytes are shown in B, kB, MB, GB or TB.

    Args:
        axes: The panel.
        x: The quantity on the axis.
        ways: For each curve, the positions of its points on this axis, in ascending order.
    """
    ends = [float(way[-1]) for way in ways]
    power = min(4, int(math.log(max(*ends, 1), 1000))) if x == "bytes" else 0
    if x != "round" and min(ends) > 0 and max(ends) / min(ends) >= 10 and min(float(way[0]) for way in ways) > 0:
        logarithmic(axes, x=True)
    elif x != "bytes":
        _whole(axes)
    if x == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000**power:g}")
    axes.set_xlabel(f"{LABELS[x]} ({('B', 'kB', 'MB', 'GB', 'TB')[power]})" if x == "bytes" else LABELS[x])


def _whole(axes: Axes) -> None:
    """Put the ticks of a horizontal axis of rounds, exchanges or local steps at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=(1, 2, 5, 10)))


def against(layout: Layout, axis: str) -> Picture:
    """Make the picture of the metric against a numeric axis of the sweep.

    There is one line per row, and one panel for every combination of values on the other axes.

    Raises:
        ConfigError: No run has the axis, or its values are not numbers.
    """
    layout.check(axis, "against")
    if not layout.numeric(axis):
        raise ConfigError(f"[report] against needs an axis of numbers, but {axis} has {', '.join(layout.values(axis))}")
    others = [other for other in (layout.row_axis, *layout.rest) if other and other != axis]
    kept = others[1:] if others and others[0] == layout.row_axis else others
    row_axis = layout.row_axis if layout.row_axis != axis else ""
    runs = [cell for cell in layout.cells if axis in cell.axes]
    groups = layout.by(kept, runs)
    entries: dict[tuple[str, ...], dict[str, list[tuple[float, Entry]]]] = {}
    for key, of in groups.items():
        for (row, value), cells in layout.by((row_axis, axis), of).items():
            if (entry := layout.entry(cells)).values:
                entries.setdefault(key, {}).setdefault(row, []).append((float(value), entry))

    def draw() -> Figure:
        rows = [row for row in layout.rows if any(row in of for of in entries.values())] if row_axis else []
        with panels([layout.heading(kept, key) for key in entries], rows) as (figure, every):
            for axes, of in zip(every, entries.values(), strict=True):
                for row, points in of.items():
                    points = sorted(points, key=lambda point: point[0])
                    look = line(layout.rows.index(row) if row in layout.rows else 0)
                    spread = [entry.std if len(entry.values) > 1 else 0.0 for _, entry in points]
                    axes.errorbar([x for x, _ in points], [e.mean for _, e in points], spread, capsize=2.5, **look, label=row)
                axes.set_xlabel(axis)
                _ticks(axes, [float(value) for value in layout.values(axis, runs)])
            if every:
                (percent_limits if scale(layout.metric) == 100 else same_limits)(every)
            for axes in first_of_lines(every):
                axes.set_ylabel(wrapped(layout.title(), 30))
            if row_axis:
                legend(figure, every, dict(zip(rows, rows, strict=True)))
        return figure

    words = {
        " ".join(part for part in (*key, row) if part != "–"): ", ".join(f"{as_text(e.mean, layout.metric)} at {x:g}" for x, e in points)
        for key, of in entries.items()
        for row, points in of.items()
    }
    name = f"{_capital(layout.title())} ({'best' if layout.settings.at == 'best' else 'last'} round) against {axis}."
    file = "".join(c if c.isalnum() or c in "-_" else "_" for c in axis)
    return Picture(f"against-{file}", f"{name} Bars are one standard deviation over seeds.", f"Lines: {name} {in_words(words)}.", draw)


def _ticks(axes: Axes, values: Sequence[float]) -> None:
    """Put the horizontal ticks at ``values``, unless there are more than nine.

    The axis is logarithmic if all values are above 0 and the largest is at least 20 times the smallest.
    """
    if min(values) > 0 and max(values) / min(values) >= 20:
        logarithmic(axes, x=True)
        axes.xaxis.set_minor_locator(NullLocator())
    if len(values) <= 9:
        axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)], rotation=0 if len(values) < 6 else 45)


def diagnostics(layout: Layout) -> list[Picture]:
    """Make a picture for each column with diagnostics: their values over rounds, and by layer in the last round."""
    made = []
    for number, column in enumerate(layout.columns, 1):
        quantities = _diagnostics(layout, column)
        if quantities:
            name = "diagnostics" if len(layout.columns) == 1 else f"diagnostics-{number}"
            where = f" ({layout.column_heading(column)})" if layout.rest else ""
            caption = f"Diagnostics of the layers{where}: over rounds, median and range over layers; right, by layer in the last round."
            alt = f"Lines{where}: {', '.join(quantities)}; over rounds, and by layer in the last round."
            made.append(Picture(name, caption, alt, partial(_draw_diagnostics, layout, quantities)))
    return made


Layers = Mapping[str, Mapping[int, float]]  # mean over seeds, by layer and round


def _diagnostics(layout: Layout, column: str) -> dict[str, dict[str, Layers]]:
    """Return the diagnostics in a column, as means over seeds: quantity -> row -> layer -> round -> value."""
    quantities: dict[str, dict[str, Layers]] = {}
    for row in layout.rows:
        cells = [cell for cell in layout.finished(row, column) if cell.layers]
        for quantity in dict.fromkeys(q for cell in cells for q in cell.layers):
            values: dict[str, dict[int, list[float]]] = {}
            for cell in cells:
                for layer, of in cell.layers.get(quantity, {}).items():
                    for round, value in of.items():
                        values.setdefault(layer, {}).setdefault(round, []).append(value)
            quantities.setdefault(quantity, {})[row] = {
                layer: {round: float(np.mean(v)) for round, v in of.items() if np.isfinite(v).all()} for layer, of in values.items()
            }
    return quantities


def _draw_diagnostics(layout: Layout, quantities: Mapping[str, Mapping[str, Layers]]) -> Figure:
    rows = [row for row in layout.rows if any(row in of for of in quantities.values())]
    layers = {quantity: list(dict.fromkeys(layer for values in of.values() for layer in values)) for quantity, of in quantities.items()}
    quantities = dict(
        sorted(quantities.items(), key=lambda one: len(layers[one[0]]) > 1)
    )  # quantities with one panel come first, so that they fill lines together
    names: list[str | None] = [quantity for quantity in quantities if len(layers[quantity]) == 1]
    names += [None] * (len(names) % 2)
    for quantity in quantities:
        names += [quantity, f"{quantity}: last round"] if len(layers[quantity]) > 1 else []
    with panels(names, rows, size=(3.8, 2.7), across=2) as (figure, every):
        free = list(every)
        for quantity, of in quantities.items():
            panel = [free.pop(0) for _ in range(2 if len(layers[quantity]) > 1 else 1)]
            for row, values in of.items():
                look = line(layout.rows.index(row))
                rounds = sorted({round for curve in values.values() for round in curve})
                spread = [[curve[r] for curve in values.values() if r in curve] for r in rounds]
                panel[0].plot(rounds, [np.median(s) for s in spread], **look, markevery=max(1, len(rounds) // 7), label=row)
                if len(panel) > 1:
                    panel[0].fill_between(rounds, [min(s) for s in spread], [max(s) for s in spread], color=look["color"], alpha=0.12, lw=0)
                    have = [layer for layer in layers[quantity] if values.get(layer)]
                    at = [layers[quantity].index(layer) for layer in have]
                    panel[1].plot(at, [values[layer][max(values[layer])] for layer in have], **look)
            numbers = [value for values in of.values() for curve in values.values() for value in curve.values()]
            for axes in panel:
                if numbers and min(numbers) > 0 and max(numbers) / min(numbers) > 100:
                    logarithmic(axes)
                axes.set_xlabel("round" if axes is panel[0] else "layer")
            _whole(panel[0])
            if len(panel) > 1 and len(layers[quantity]) <= 24:
                panel[1].set_xticks(range(len(layers[quantity])), [layer[-22:] for layer in layers[quantity]], rotation=90, fontsize=6.5)
                panel[1].set_xlabel("")
        legend(figure, every, dict(zip(rows, rows, strict=True)))
    return figure


def _band(available: Sequence[Series]) -> str:
    """Return the sentences of a caption that explain bands (standard deviations) and pale lines (some runs have no result)."""
    several = len({one.column for one in available}) > 1
    where = {id(one): f"{one.row} ({one.column})" if several else one.row for one in available}
    fewer = [f"{where[id(one)]}: {one.seeds} of {one.runs} runs" for one in available if one.seeds < one.runs]
    said = [BAND] if any(one.seeds > 1 for one in available) else []
    said += [f"Pale lines lack the runs without a result ({'; '.join(dict.fromkeys(fewer))})."] if fewer else []
    return "".join(f" {sentence}" for sentence in said)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
