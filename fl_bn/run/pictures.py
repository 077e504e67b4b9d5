"""Pictures of a run and of a comparison."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # Ray and Flower run the ServerApp in a thread: no window

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from fl_bn.federation.record import RoundRecord  # noqa: E402
from fl_bn.run.config import RunConfig  # noqa: E402
from fl_bn.task import CLASSIFICATION, MEAN_IOU, Task  # noqa: E402

STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130, "font.size": 9}


def draw_run(config: RunConfig, records: Sequence[RoundRecord], path: Path, task: Task = CLASSIFICATION) -> None:
    """The task's metric and the training loss over rounds, and below how far the running statistics moved."""
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.6), sharex=True, height_ratios=(3, 2), layout="constrained")
        _metric(top, records, task)
        _drift(bottom, records)
        for axes in (top, bottom):
            _phases(axes, records)
        top.set_title(f"{config.method} on {config.dataset}: {config.clients} clients, {_partition(config)}, seed {config.seed}")
        bottom.set_xlabel("round")
        figure.savefig(path)
        plt.close(figure)


def in_words(task: Task) -> str:
    """The name of the task's metric, for pictures and headings: ``mean average precision``."""
    return task.metric.replace("-", " ")


def axis_of(task: Task, prefix: str = "") -> str:
    """Its name for an axis, with the unit where it has one: ``accuracy (%)``."""
    return f"{prefix}{in_words(task)}{' (%)' if task.scale() == 100 else ''}"


def in_table(task: Task, value: float) -> str:
    """A value of it below ``axis_of``: ``51.2`` of percent, or ``0.3456``."""
    return f"{100 * value:.1f}" if task.scale() == 100 else f"{value:.4g}"


def _metric(axes: Axes, records: Sequence[RoundRecord], task: Task) -> None:
    scale, evaluated = task.scale(), [r for r in records if task.metric in r.evaluation]
    rounds = [r.round for r in evaluated]
    values = [scale * r.evaluation[task.metric] for r in evaluated]
    axes.plot(rounds, values, "o-", ms=3, color="C0", label=f"test {in_words(task)}")
    if evaluated:
        shown = f"{values[-1]:.1f} %" if scale == 100 else f"{values[-1]:.4g}"
        axes.annotate(shown, (rounds[-1], values[-1]), xytext=(-6, 7), textcoords="offset points", color="C0", ha="right")
    segmented = [r for r in evaluated if MEAN_IOU in r.evaluation]
    if segmented:
        axes.plot([r.round for r in segmented], [100 * r.evaluation[MEAN_IOU] for r in segmented], "s-", ms=3, color="C1", label="mean IoU")
    if any(r.client_evaluation for r in evaluated):
        spread = [[scale * m[task.metric] for m in r.client_evaluation.values()] for r in evaluated]
        axes.fill_between(rounds, [min(s) for s in spread], [max(s) for s in spread], alpha=0.15, color="C0", label="clients, min to max")
    axes.set_ylabel(axis_of(task))
    if scale == 100:
        axes.set_ylim(0, 100)
    loss = axes.twinx()
    loss.plot([r.round for r in records], [r.loss for r in records], color="0.6", lw=1, label="training loss (clients)")
    loss.set_ylabel("loss", color="0.5")
    loss.set_ylim(bottom=0)
    loss.grid(False)
    handles = [*axes.get_legend_handles_labels()[0], *loss.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper left", frameon=False)


def _drift(axes: Axes, records: Sequence[RoundRecord]) -> None:
    moved = [r for r in records if r.drift is not None]
    if not moved:
        axes.text(0.5, 0.5, "no running statistics", ha="center", va="center", transform=axes.transAxes)
        return
    drift = [r.drift.largest or np.nan for r in moved if r.drift]
    axes.plot([r.round for r in moved], drift, color="C3", lw=1, label="largest drift of a mean (sd)")
    axes.plot([r.round for r in moved], [r.drift.min_var for r in moved if r.drift], color="C2", lw=1, label="smallest running variance")
    if np.isfinite(drift).any():
        axes.set_yscale("log")
    axes.set_ylabel("running statistics")
    axes.legend(frameon=False, loc="best")


def _phases(axes: Axes, records: Sequence[RoundRecord]) -> None:
    """Grey where the statistics are frozen; a dotted line where the learning rate steps."""
    frozen = [r.round for r in records if r.phase == "frozen"]
    if frozen:
        axes.axvspan(frozen[0] - 0.5, frozen[-1] + 0.5, color="0.92", zorder=0)
        axes.text(frozen[-1], axes.get_ylim()[1], "statistics frozen ", va="top", ha="right", fontsize=7, color="0.4")
    rates = [r.learning_rate for r in records]
    level = [i < 2 or rates[i - 1] == rates[i - 2] for i in range(len(rates))]  # a cosine falls from round to round, and has no steps
    for round in [r.round for i, r in enumerate(records) if i > 0 and level[i] and rates[i] < rates[i - 1] * 0.7]:
        axes.axvline(round - 0.5, color="0.5", lw=0.8, ls=":")


def draw_labels(
    counts: Mapping[int, Sequence[int]], config: RunConfig, path: Path, domains: Mapping[str, Sequence[int]] | None = None
) -> None:
    """How many samples of each class every client has: a disc's area is the number of samples.

    ``domains``: domain -> samples of it per client, in the order of the clients; drawn below, where there is more than one.
    """
    table = np.array([counts[client] for client in sorted(counts)])
    clients, classes = table.shape
    names = list(domains or {})
    below = np.array([domains[name] for name in names]).T if domains and len(names) > 1 else np.empty((clients, 0), dtype=int)
    wide, high = min(14, 2.5 + 0.45 * clients), min(12, 1.6 + 0.32 * classes)
    with plt.rc_context(STYLE):
        ratio, extra = (classes, max(below.shape[1], 1)), 0.32 * below.shape[1]
        figure, all_axes = plt.subplots(
            2 if below.size else 1, 1, figsize=(wide, high + extra), sharex=True, squeeze=False, layout="constrained",
            height_ratios=ratio if below.size else None,
        )  # fmt: skip
        axes, last = all_axes[0, 0], all_axes[-1, 0]
        _discs(axes, table, "tab10" if classes <= 10 else "viridis")
        axes.set(ylabel="class" if classes > 1 else "")
        if classes <= 30:
            axes.set_yticks(range(classes) if classes > 1 else [])
        if below.size:
            _discs(last, below, "Dark2")
            last.set_yticks(range(len(names)), names)
            last.set_ylabel("domain")
        last.set(xlabel="client")
        if clients <= 30:
            last.set_xticks(range(clients))
        unit = "pixels" if table.sum() > below.sum() > 0 else "samples"
        title = textwrap.wrap(f"training {unit}: {_partition(config)}, {table.sum()} in all", int(13 * wide))
        axes.set_title("\n".join(title))
        figure.savefig(path)
        plt.close(figure)


def _discs(axes: Axes, table: np.ndarray, colours: str) -> None:
    """One disc per entry of ``table`` (clients, rows) that is not 0, coloured by its row."""
    clients, rows = table.shape
    x, y = np.meshgrid(np.arange(clients), np.arange(rows), indexing="ij")
    present = table > 0
    axes.scatter(x[present], y[present], s=260 * table[present] / table.max(), c=y[present], cmap=colours)
    if clients * rows <= 200:
        for client, row in zip(*np.nonzero(present), strict=True):
            axes.annotate(str(table[client, row]), (client, row), xytext=(9, 0), textcoords="offset points", fontsize=6, va="center")
    axes.set(xlim=(-0.6, clients - 0.2), ylim=(-0.6, rows - 0.4))


def draw_comparison(
    curves: Mapping[str, np.ndarray], rounds: Mapping[str, Sequence[int]], title: str, path: Path, task: Task = CLASSIFICATION
) -> None:
    """The task's metric over rounds, of several methods. ``curves``: method -> (seeds, evaluations), in percent where it is a share; band:
    one standard deviation."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
        sign, digits = (-1 if task.higher_is_better else 1), ".1f" if task.scale() == 100 else ".3g"
        order = sorted(curves, key=lambda name: sign * curves[name][:, -1].mean())
        for name in order:
            values, index = curves[name], list(curves).index(name)
            colour, line = f"C{index % 10}", ("-", "--", ":", "-.")[index // 10 % 4]
            mean, std = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            label = f"{name}  {mean[-1]:{digits}}" + (f" ± {std[-1]:{digits}}" if len(values) > 1 else "")
            axes.plot(rounds[name], mean, line, color=colour, lw=1.5, label=label)
            axes.fill_between(rounds[name], mean - std, mean + std, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="round", ylabel=axis_of(task, "test "), title="\n".join(textwrap.wrap(title, 66)))
        axes.legend(frameon=False, title="last round", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path)
        plt.close(figure)


def draw_heat_maps(maps: Mapping[str, np.ndarray], rows: Sequence[str], columns: Sequence[str], title: str, path: Path) -> None:
    """One map (rows, columns) of percentages per name, side by side, with its numbers; NaN is left white."""
    with plt.rc_context({**STYLE, "axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}):
        size = (1.6 + len(maps) * (1.0 + 0.75 * len(columns)), 1.6 + 0.45 * len(rows))
        figure, all_axes = plt.subplots(1, len(maps), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes, (name, values) in zip(all_axes[0], maps.items(), strict=True):
            image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            for row, column in np.ndindex(values.shape):
                if np.isfinite(value := values[row, column]):
                    axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black")
            axes.set_xticks(range(len(columns)), columns)
            axes.set_yticks(range(len(rows)), rows)
            axes.set(title=name, xlabel="heterogeneity")
        figure.colorbar(image, ax=all_axes, label="accuracy (%)")
        figure.suptitle("\n".join(line for part in title.splitlines() for line in textwrap.wrap(part, 80)))
        figure.savefig(path)
        plt.close(figure)


def draw_bars(panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path, task: Task = CLASSIFICATION) -> None:
    """One panel per title: groups of bars, group -> bar -> values of the task's metric, in percent where it is a share; a bar is their
    mean, its whisker their standard deviation."""
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
                    axes.bar(x, mean, 0.92 * width, yerr=spread, color="0.6" if index == 0 else f"C{index - 1}", error_kw={"lw": 0.8})
                    if task.scale() == 100:
                        axes.text(x, 1.5, f"{mean:.0f}", ha="center", va="bottom", fontsize=6.5, color="white")
                    else:
                        axes.text(x, mean, f"{mean:.3g}", ha="center", va="bottom", fontsize=6.5)
            axes.set_xticks(range(len(groups)), list(groups))
            if task.scale() == 100:
                axes.set_ylim(0, 100)
            axes.set_title("\n".join(textwrap.wrap(title, 30)), fontsize=9)
            axes.grid(visible=False, axis="x")
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(axis_of(task, "test "))
        handles = [Patch(color="0.6" if index == 0 else f"C{index - 1}", label=name) for index, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _partition(config: RunConfig) -> str:
    kind = {
        "iid": "IID",
        "classes": f"{config.partition_parameter:g} class{'' if config.partition_parameter == 1 else 'es'} each",
        "dirichlet": f"Dirichlet({config.partition_parameter:g})",
        "similarity": f"similarity {config.partition_parameter:g}",
        "table": f"{config.partition_parameter:g} consecutive classes each",
        "domain": "one domain each",
        "natural": "one group each",
    }[config.partition]
    return f"{kind}, equal sizes" if config.sizes == "equal" else kind
