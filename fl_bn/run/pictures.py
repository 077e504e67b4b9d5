"""Draw the pictures of a run, of its labels and of an adaptation."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws without windows, since Ray and Flower run the ServerApp in a thread

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.cm import ScalarMappable  # noqa: E402
from matplotlib.colors import Normalize, to_rgba  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter  # noqa: E402

from fl_bn.data.record import evaluated_on  # noqa: E402
from fl_bn.federation.record import RoundRecord  # noqa: E402
from fl_bn.run.config import RunConfig  # noqa: E402
from fl_bn.run.palette import MAP, QUIET, SHADES, STYLE, colour, line, on  # noqa: E402
from fl_bn.task import CLASSIFICATION, MEAN_IOU, Task  # noqa: E402

STEPS = (1, 2, 5, 10)  # allowed distances between ticks of whole numbers, times a power of ten: 20, 40, 60, but not 15, 30, 45


def draw_run(config: RunConfig, records: Sequence[RoundRecord], path: Path, task: Task = CLASSIFICATION) -> None:
    """Draw the task's metric and the training loss of a run over its rounds.

    If the run has running statistics, two more panels show how far the statistics moved, and the smallest variance.

    Args:
        config: The run config.
        records: The records of the rounds.
        path: The file of the picture.
        task: The task.
    """
    moved = [r for r in records if r.drift is not None]
    split = evaluated_on(config.validation_share, config.changes.split)
    panels: list[Callable[[Axes], None]] = [lambda axes: _metric(axes, records, task, split), lambda axes: _loss(axes, records)]
    if moved:
        panels += [lambda axes: _drift(axes, moved), lambda axes: _variance(axes, moved)]
    ratios = (2.4, *[1] * (len(panels) - 1))
    with plt.rc_context(STYLE):
        size = (7, 1.2 + 1.25 * sum(ratios))
        figure, all_axes = plt.subplots(len(panels), 1, figsize=size, sharex=True, height_ratios=ratios, layout="constrained")
        for axes, draw in zip(all_axes, panels, strict=True):
            draw(axes)
        _phases(all_axes, records)
        all_axes[-1].set_xlabel("round")
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=STEPS))
        title = f"{config.method} on {config.dataset}: {config.clients} clients, {partition_in_words(config)}, seed {config.seed}"
        figure.suptitle(lines(title, 80))
        figure.savefig(path, bbox_inches="tight")  # tight, since the constrained layout may cut a long label
        plt.close(figure)


def in_words(task: Task) -> str:
    """Return the name of the task's metric for pictures and headings, such as ``mean average precision``."""
    return task.metric.replace("-", " ")


def axis_of(task: Task, prefix: str = "") -> str:
    """Return the name of the task's metric for an axis, with its unit, such as ``accuracy (%)``."""
    return f"{prefix}{in_words(task)}{' (%)' if task.scale() == 100 else ''}"


def in_table(task: Task, value: float) -> str:
    """Format a value of the task's metric for a table: ``51.2`` if it is shown in percent, else ``0.3456``."""
    return f"{100 * value:.1f}" if task.scale() == 100 else f"{value:.4g}"


def _metric(axes: Axes, records: Sequence[RoundRecord], task: Task, split: str) -> None:
    scale, evaluated = task.scale(), [r for r in records if task.metric in r.evaluation]
    rounds = [r.round for r in evaluated]
    values = [scale * r.evaluation[task.metric] for r in evaluated]
    if any(r.client_evaluation for r in evaluated):
        spread = [[scale * m[task.metric] for m in r.client_evaluation.values()] or [np.nan] for r in evaluated]
        band = [min(s) for s in spread], [max(s) for s in spread]
        axes.fill_between(rounds, *band, alpha=0.2, lw=0, color=colour(0), label="clients, worst to best")
    axes.plot(rounds, values, **{**line(0), "ms": 3.5 if len(rounds) <= 40 else 0}, label=f"{split} {in_words(task)}")
    if evaluated:
        shown = f"{values[-1]:.1f} %" if scale == 100 else f"{values[-1]:.4g}"
        below = len(values) > 1 and values[-1] < values[-2]
        where: dict[str, Any] = {"xytext": (0, -7), "va": "top"} if below else {"xytext": (0, 7), "va": "bottom"}
        axes.annotate(shown, (rounds[-1], values[-1]), textcoords="offset points", color=colour(0), ha="right", weight="bold", **where)
    segmented = [r for r in evaluated if MEAN_IOU in r.evaluation]
    if segmented:
        axes.plot([r.round for r in segmented], [100 * r.evaluation[MEAN_IOU] for r in segmented], **line(1), label="mean IoU")
    axes.set_ylabel(axis_of(task, f"{split} "))
    if scale == 100:
        axes.set_ylim(0, 106)
        axes.set_yticks(range(0, 101, 20))
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc="best")


def _loss(axes: Axes, records: Sequence[RoundRecord]) -> None:
    axes.plot([r.round for r in records], [r.loss for r in records], color=colour(4), lw=1.2)
    axes.set_ylabel("training loss\n(clients)")
    axes.set_ylim(bottom=0)


def _drift(axes: Axes, moved: Sequence[RoundRecord]) -> None:
    drift = [r.drift.largest or np.nan for r in moved if r.drift]
    axes.plot([r.round for r in moved], drift, color=colour(2), lw=1.2)
    axes.set_ylabel("largest drift\nof a mean (sd)")
    _decades(axes, drift)


def _variance(axes: Axes, moved: Sequence[RoundRecord]) -> None:
    smallest = [r.drift.min_var for r in moved if r.drift]
    axes.plot([r.round for r in moved], smallest, color=colour(6), lw=1.2)
    axes.set_ylabel("smallest\nvariance")
    _decades(axes, smallest)


def _decades(axes: Axes, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic, with plain numbers at its ticks, if the largest value is over five times the smallest."""
    known = [value for value in values if np.isfinite(value) and value > 0]
    if known and max(known) > 5 * min(known):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if max(known) < 300 * min(known) else (1.0,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _phases(all_axes: Sequence[Axes], records: Sequence[RoundRecord]) -> None:
    """Mark rounds with frozen statistics in grey, and steps of the learning rate by dotted lines, with remarks above."""
    frozen = [r.round for r in records if r.phase == "frozen"]
    rates = [r.learning_rate for r in records]
    level = [
        i < 2 or rates[i - 1] == rates[i - 2] for i in range(len(rates))
    ]  # a cosine schedule falls in every round, so it has no steps to mark
    steps = [i for i in range(1, len(records)) if level[i] and rates[i] < rates[i - 1] * 0.7]
    for axes in all_axes:
        if frozen:
            axes.axvspan(frozen[0] - 0.5, frozen[-1] + 0.5, color="0.92", zorder=0, lw=0)
        for i in steps:
            axes.axvline(records[i].round - 0.5, color=QUIET, lw=0.8, ls=":")
    remarks = [(records[i].round - 0.5, f"learning rate {rates[i]:.3g}") for i in steps]
    _remarks(all_axes[0], [*remarks, *([(frozen[0] - 0.5, "grey: statistics frozen")] if frozen else [])])


def _remarks(axes: Axes, remarks: Sequence[tuple[float, str]]) -> None:
    """Write remarks above a panel, without overlap.

    Args:
        axes: The panel.
        remarks: Pairs of a horizontal position, in data coordinates, and a text.
    """
    low, high = axes.get_xlim()
    points = axes.get_window_extent().width * 72 / axes.figure.dpi
    rows: list[list[tuple[float, float]]] = []
    for x, text in remarks:
        at, wide = (x - low) / (high - low), 4.1 * len(text) / points
        late = at + wide > 1
        span = (at - wide, at) if late else (at, at + wide)
        row = next((n for n, taken in enumerate(rows) if all(span[1] < a or b < span[0] for a, b in taken)), len(rows))
        rows += [[]] if row == len(rows) else []
        rows[row].append(span)
        place: Any = {"ha": "right" if late else "left", "va": "bottom", "fontsize": 7, "color": QUIET, "textcoords": "offset points"}
        axes.annotate(text, (x, 1), (-1 if late else 1, 2 + 9 * row), xycoords=("data", "axes fraction"), **place)


def draw_labels(
    counts: Mapping[int, Sequence[int]], config: RunConfig, path: Path, domains: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Draw how many samples of each class every client has, with one bar per client and one colour per class.

    Args:
        counts: The number of samples per class, by client.
        config: The run config, for names and the title.
        path: The file of the picture.
        domains: Name of a domain -> the number of its samples at each client. They are drawn if there are several domains.
    """
    table = np.array([counts[client] for client in sorted(counts)])
    clients, classes = table.shape
    names = list(domains or {})
    below = np.array([domains[name] for name in names]).T if domains and len(names) > 1 else np.empty((clients, 0), dtype=int)
    unit = "pixels" if table.sum() > below.sum() > 0 else "samples"
    wide = max(5.6, min(14, 2.8 + 0.42 * clients))
    panels = 2 if below.size else 1
    with plt.rc_context({**STYLE, "axes.grid.axis": "y"}):
        size = (wide, 0.6 + 3.2 * panels)
        figure, all_axes = plt.subplots(panels, 1, figsize=size, sharex=True, squeeze=False, layout="constrained")
        _stacked(all_axes[0, 0], table, [str(number) for number in range(classes)] if classes > 1 else [""], "class")
        all_axes[0, 0].set_ylabel(f"training {unit}")
        if below.size:
            _stacked(all_axes[1, 0], below, names, "domain")
            all_axes[1, 0].set_ylabel("training samples")
        last = all_axes[-1, 0]
        last.set_xlabel("site" if config.client_names else "client")
        last.xaxis.set_major_locator(MaxNLocator(integer=True, steps=STEPS))
        if clients <= 30:
            shown = [config.called.site(client) or str(client) for client in sorted(counts)]
            long = config.client_names != "" and sum(map(len, shown)) > 9 * wide
            last.set_xticks(range(clients), shown, rotation=45 if long else 0, ha="right" if long else "center")
        last.set_xlim(-0.6, clients - 0.4)
        figure.suptitle(lines(f"training {unit}: {partition_in_words(config)}, {table.sum()} in all", int(11 * wide)))
        figure.savefig(path)
        plt.close(figure)


def _stacked(axes: Axes, table: np.ndarray, names: Sequence[str], what: str) -> None:
    """Draw stacked bars, one per client.

    Args:
        axes: The panel.
        table: The heights of the parts, of shape (clients, names).
        names: The name of each part. It is written in the part if there is room.
        what: The title of the legend: ``class`` or ``domain``.
    """
    clients, rows = table.shape
    few = rows <= len(SHADES)
    shades = [to_rgba(SHADES[i]) for i in range(rows)] if few else [matplotlib.colormaps[MAP](i / (rows - 1)) for i in range(rows)]
    base, most = np.zeros(clients), max(1, table.sum(1).max())
    for row, shade in enumerate(shades):
        axes.bar(range(clients), table[:, row], 0.82, base, color=shade, edgecolor="white", lw=0.5, label=names[row])
        for client in np.flatnonzero(table[:, row] > 0.05 * most) if few and clients <= 30 and what == "class" and rows > 1 else ():
            place = float(client), float(base[client] + table[client, row] / 2)
            axes.text(*place, names[row], ha="center", va="center", fontsize=7, color=on(shade))
        base += table[:, row]
    axes.set_ylim(0, 1.04 * most)
    if few and rows > 1:
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], title=what, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    elif not few:
        scale = ScalarMappable(Normalize(0, rows - 1), MAP)
        axes.figure.colorbar(scale, ax=axes, label=what, ticks=MaxNLocator(8, integer=True))


def draw_bars(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path, task: Task = CLASSIFICATION) -> None:
    """Draw panels with groups of bars. A bar is the mean of its values. Its whisker is one standard deviation.

    Args:
        panels: Title of a panel -> name of a group -> name of a bar -> its values of the task's metric, in percent if the
            metric is a share.
        path: The file of the picture.
        task: The task.
    """
    names = list(dict.fromkeys(bar for groups in panels.values() for bars in groups.values() for bar in bars))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    letters = max(sum(len(group) + 2 for group in groups) for groups in panels.values())
    most, width = max(len(groups) for groups in panels.values()), 0.8 / len(names)
    with plt.rc_context(STYLE):
        size = (1.2 + across * max(2.6, 0.2 * most * (2 + len(names)), 0.085 * letters), 0.6 + 2.9 * down)
        figure, grid = plt.subplots(down, across, figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes, (title, groups) in zip(grid.flat, panels.items(), strict=False):
            for place, bars in enumerate(groups.values()):
                for index, name in enumerate(names):
                    if not (values := bars.get(name)):
                        continue
                    x, mean = place + (index - (len(names) - 1) / 2) * width, float(np.mean(values))
                    spread = np.std(values, ddof=1) if len(values) > 1 else None
                    shade = QUIET if index == 0 else colour(index - 1)
                    axes.bar(x, mean, 0.92 * width, yerr=spread, color=shade, error_kw={"lw": 0.8})
                    if task.scale() == 100:
                        axes.text(x, 1.5, f"{mean:.0f}", ha="center", va="bottom", fontsize=6.5, color=on(to_rgba(shade)))
                    else:
                        axes.text(x, mean, f"{mean:.3g}", ha="center", va="bottom", fontsize=6.5)
            axes.set_xticks(range(len(groups)), list(groups))
            if task.scale() == 100:
                axes.set_ylim(0, 100)
            axes.set_title(lines(title, 30), fontsize=9)
            axes.grid(visible=False, axis="x")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(axis_of(task, "test "))
        handles = [Patch(color=QUIET if index == 0 else colour(index - 1), label=name) for index, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        figure.savefig(path)
        plt.close(figure)


def lines(text: str, width: int) -> str:
    """Break ``text`` into the fewest lines of at most ``width`` letters, all of about the same length."""
    few = textwrap.wrap(text, width)
    narrower = (textwrap.wrap(text, narrow) for narrow in range(max(1, -(-len(text) // max(1, len(few)))), width))
    return "\n".join(next((made for made in narrower if len(made) == len(few)), few))


def partition_in_words(config: RunConfig) -> str:
    """Return a text that says how the data of a run are divided among the clients, such as ``Dirichlet(0.1)``."""
    kind = {
        "auto": "each its own data",
        "iid": "IID",
        "classes": f"{config.partition_parameter:g} class{'' if config.partition_parameter == 1 else 'es'} each",
        "dirichlet": f"Dirichlet({config.partition_parameter:g})",
        "similarity": f"similarity {config.partition_parameter:g}",
        "table": f"{config.partition_parameter:g} consecutive classes each",
        "domain": "one domain each",
        "domain-dirichlet": f"one domain each, Dirichlet({config.partition_parameter:g}) within",
        "natural": "one group each",
    }[config.partition]
    return f"{kind}, equal sizes" if config.sizes == "equal" else kind


def which_end(partition: str, values: Sequence[float]) -> str:
    """Return the label of an axis of ``partition-parameter``. The label says at which end of the axis the data are IID.

    Args:
        partition: The run-config key ``partition``.
        values: The values of ``partition-parameter`` on the axis, in their order.
    """
    name = {"similarity": "similarity", "dirichlet": "concentration", "classes": "classes per client"}.get(partition)
    if name is None or len(values) < 2 or values[0] == values[-1]:
        return name or "heterogeneity"
    ends = ("IID", "far from IID") if values[0] > values[-1] else ("far from IID", "IID")
    return f"{ends[0]} ← {name} → {ends[1]}"
