"""Draw pictures: what all of them share, the course of a run, and the labels of its clients."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from fl_bn.app.config import RunConfig
from fl_bn.app.palette import MAP, SHADES, STYLE, colour, line
from fl_bn.data.record import evaluated_on
from fl_bn.federation.record import RoundRecord
from fl_bn.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Picture:
    """Hold a picture, which is drawn when it is needed.

    ``name`` is that of the file, without suffix.
    """

    name: str
    caption: str
    draw: Callable[[], Figure]

    @cached_property
    def figure(self) -> Figure:
        """Return the figure, which is drawn once."""
        with matplotlib.rc_context(STYLE):
            return self.draw()

    @cached_property
    def png(self) -> bytes:
        """Return the content of the PNG file."""
        target = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(target, format="png", facecolor="white")
        return target.getvalue()


def curve(axes: Axes, x: Any, y: Any, low: Any = (), high: Any = (), band: str | None = None, **look: Any) -> None:
    """Draw a line with this ``look``, and a band from ``low`` to ``high``, if any, with the label ``band``."""
    axes.plot(x, y, **look)
    if len(low):
        axes.fill_between(x, low, high, color=look["color"], alpha=0.16, lw=0, label=band)


def whole_ticks(axes: Axes, most: int = 10) -> None:
    """Put the ticks of the horizontal axis at whole numbers: 20, 40, 60, but not 15, 30, 45."""
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=(1, 2, 5, 10)))


class Plain(LogFormatter):
    """Label the ticks of a logarithmic axis by plain numbers, as 0.092, since dollars of names begin no formula."""

    def __call__(self, value: float, place: int | None = None) -> str:
        """Return the label of a tick; empty if it gets none."""
        return f"{value:.3g}" if super().__call__(value, place) else ""


def log_scale(axes: Axes, which: str) -> None:
    """Make the axis ``which`` (x or y) logarithmic, with plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    getattr(axes, f"{which}axis").set(major_formatter=Plain(), minor_formatter=Plain())


def course(config: RunConfig, records: Sequence[RoundRecord], task: Task = CLASSIFICATION) -> Picture:
    """Make the picture of a run's metric and training loss over its rounds, those of frozen statistics in grey.

    If the run has running statistics, two more panels show how far they moved, and
    the smallest variance.
    """
    title = f"{config.method} on {config.dataset}: {config.clients} clients, {config.partition_in_words()}, seed {config.seed}"
    panels = {"training loss\n(clients)": {r.round: r.loss for r in records}}
    if any(r.drift for r in records):
        panels["largest drift\nof a mean (sd)"] = {r.round: r.drift.largest for r in records if r.drift}
        panels["smallest\nvariance"] = {r.round: r.drift.min_var for r in records if r.drift}
    frozen = [r.round for r in records if r.phase == "frozen"]

    def draw() -> Figure:
        ratios = (2.4, *[1] * len(panels))
        figure = Figure(figsize=(7, 4.2 + 1.25 * len(panels)), layout="constrained")
        every = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
        _metric(every[0], records, task, evaluated_on(config.validation_share, config.changes.split))
        for axes, (label, values), index in zip(every[1:], panels.items(), (4, 2, 6), strict=False):
            curve(axes, [*values], [*values.values()], color=colour(index), lw=1.2)
            axes.set_ylabel(label)
            if index != 4 and any(value > 0 for value in values.values()):
                log_scale(axes, "y")
        if frozen:
            every[0].set_title("grey: statistics frozen", loc="right", fontsize=8)
        for axes in every if frozen else ():
            axes.axvspan(frozen[0] - 0.5, frozen[-1] + 0.5, color="0.92", zorder=0, lw=0)
        every[-1].set_xlabel("round")
        whole_ticks(every[-1])
        figure.suptitle(title)
        return figure

    return Picture(task.metric, title, draw)


def _metric(axes: Axes, records: Sequence[RoundRecord], task: Task, split: str) -> None:
    """Draw the metric of the model and, if clients were evaluated, the band from the worst to the best of them."""
    tested = [r for r in records if task.metric in r.evaluation]
    rounds, values = [r.round for r in tested], [task.scale() * r.evaluation[task.metric] for r in tested]
    own = [[task.scale() * m[task.metric] for m in r.client_evaluation.values()] or [math.nan] for r in tested]
    name = f"{split} {task.metric.replace('-', ' ')}"
    apart = any(r.client_evaluation for r in tested)
    low, high = ([*map(min, own)], [*map(max, own)]) if apart else ([], [])
    curve(axes, rounds, values, low, high, band="clients, worst to best", label=name, **line(0))
    if apart:
        axes.legend(loc="best")
    if values:
        axes.annotate(task.format_metric(values[-1] / task.scale()), (rounds[-1], values[-1]), weight="bold")
    axes.set_ylabel(name)
    if task.scale() == 100:
        axes.set_ylabel(f"{name} (%)")
        axes.set_ylim(0, 106)


def labels(counts: Mapping[int, Sequence[int]], config: RunConfig) -> Picture:
    """Make the picture of every client's samples of each class, one bar per client and one colour per class."""
    table = np.array([counts[client] for client in sorted(counts)])
    title = f"training samples: {config.partition_in_words()}, {table.sum()} in all"

    def draw() -> Figure:
        clients, classes = table.shape
        few = classes <= len(SHADES)
        wide = max(5.6, min(14, 2.8 + 0.42 * clients))
        figure = Figure(figsize=(wide, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False, axis="x")
        base = np.zeros(clients)
        for label in range(classes):
            shade = SHADES[label] if few else matplotlib.colormaps[MAP](label / (classes - 1))
            axes.bar(range(clients), table[:, label], 0.82, base, color=shade, edgecolor="white", lw=0.5, label=str(label))
            base += table[:, label]
        legend = axes.legend(title="class", loc="center left", fontsize=8 if few else 5, ncols=1 + classes // 30, reverse=True)
        legend.set_bbox_to_anchor((1, 0.5), transform=axes.transAxes)
        axes.set(xlabel="site" if config.client_names else "client", ylabel="training samples")
        whole_ticks(axes)
        if config.client_names:
            axes.set_xticks(range(clients), [config.called.site(client) for client in sorted(counts)], rotation=45, ha="right")
        figure.suptitle("\n".join(textwrap.wrap(title, int(11 * wide))))
        return figure

    return Picture("labels", title, draw)
