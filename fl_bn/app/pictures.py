"""Draw the course of a run, and the labels of its clients."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without windows, since Ray and Flower run the ServerApp in a thread

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from fl_bn.app.config import RunConfig  # noqa: E402
from fl_bn.app.palette import MAP, SHADES, STYLE, colour, line  # noqa: E402
from fl_bn.data.record import evaluated_on  # noqa: E402
from fl_bn.federation.record import RoundRecord  # noqa: E402
from fl_bn.task import CLASSIFICATION, Task  # noqa: E402

STEPS = (1, 2, 5, 10)  # allowed distances between ticks of whole numbers, times a power of ten: 20, 40, 60, but not 15, 30, 45


def draw_run(config: RunConfig, records: Sequence[RoundRecord], path: Path, task: Task = CLASSIFICATION) -> None:
    """Draw a run's metric and training loss over its rounds, those of frozen statistics in grey.

    If the run has running statistics, two more panels show how far they moved, and
    the smallest variance.
    """
    panels = {"training loss\n(clients)": {r.round: r.loss for r in records}}
    if any(r.drift for r in records):
        panels["largest drift\nof a mean (sd)"] = {r.round: r.drift.largest for r in records if r.drift}
        panels["smallest\nvariance"] = {r.round: r.drift.min_var for r in records if r.drift}
    frozen = [r.round for r in records if r.phase == "frozen"]
    with plt.rc_context(STYLE):
        size = (7, 4.2 + 1.25 * len(panels))
        ratios = (2.4, *[1] * len(panels))
        figure, every = plt.subplots(len(ratios), 1, figsize=size, sharex=True, height_ratios=ratios, layout="constrained")
        _metric(every[0], records, task, evaluated_on(config.validation_share, config.changes.split))
        for axes, (label, values), index in zip(every[1:], panels.items(), (4, 2, 6), strict=False):
            axes.plot([*values], [*values.values()], color=colour(index), lw=1.2)
            axes.set_ylabel(label)
            axes.set_yscale("log" if index != 4 and any(value > 0 for value in values.values()) else "linear")
        if frozen:
            every[0].set_title("grey: statistics frozen", loc="right", fontsize=8)
        for axes in every if frozen else ():
            axes.axvspan(frozen[0] - 0.5, frozen[-1] + 0.5, color="0.92", zorder=0, lw=0)
        every[-1].set_xlabel("round")
        every[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=STEPS))
        figure.suptitle(f"{config.method} on {config.dataset}: {config.clients} clients, {config.partition_in_words()}, seed {config.seed}")
        figure.savefig(path, bbox_inches="tight")
        plt.close(figure)


def _metric(axes: Axes, records: Sequence[RoundRecord], task: Task, split: str) -> None:
    values = {r.round: task.scale() * r.evaluation[task.metric] for r in records if task.metric in r.evaluation}
    own = {r.round: [task.scale() * m[task.metric] for m in r.client_evaluation.values()] for r in records if r.client_evaluation}
    name = f"{split} {task.metric.replace('-', ' ')}"
    axes.plot([*values], [*values.values()], **line(0), label=name)
    if own:
        axes.fill_between([*own], [*map(min, own.values())], [*map(max, own.values())], alpha=0.2, lw=0, label="clients, worst to best")
        axes.legend(loc="best")
    if values:
        axes.annotate(task.format_metric([*values.values()][-1] / task.scale()), [*values.items()][-1], weight="bold")
    axes.set_ylabel(name)
    if task.scale() == 100:
        axes.set_ylabel(f"{name} (%)")
        axes.set_ylim(0, 106)


def draw_labels(counts: Mapping[int, Sequence[int]], config: RunConfig, path: Path) -> None:
    """Draw every client's samples of each class, one bar per client and one colour per class."""
    table = np.array([counts[client] for client in sorted(counts)])
    clients, classes = table.shape
    few = classes <= len(SHADES)
    wide = max(5.6, min(14, 2.8 + 0.42 * clients))
    with plt.rc_context({**STYLE, "axes.grid.axis": "y"}):
        figure, axes = plt.subplots(figsize=(wide, 3.8), layout="constrained")
        base = np.zeros(clients)
        for label in range(classes):
            shade = SHADES[label] if few else matplotlib.colormaps[MAP](label / (classes - 1))
            axes.bar(range(clients), table[:, label], 0.82, base, color=shade, edgecolor="white", lw=0.5, label=str(label))
            base += table[:, label]
        legend = axes.legend(title="class", loc="center left", fontsize=8 if few else 5, ncols=1 + classes // 30, reverse=True)
        legend.set_bbox_to_anchor((1, 0.5), transform=axes.transAxes)
        axes.set(xlabel="site" if config.client_names else "client", ylabel="training samples")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=STEPS))
        if config.client_names:
            axes.set_xticks(range(clients), [config.called.site(client) for client in sorted(counts)], rotation=45, ha="right")
        title = f"training samples: {config.partition_in_words()}, {table.sum()} in all"
        figure.suptitle("\n".join(textwrap.wrap(title, int(11 * wide))))
        figure.savefig(path)
        plt.close(figure)
