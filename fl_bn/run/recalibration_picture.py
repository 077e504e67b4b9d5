"""Draw ``recalibration.png``: how far each pass of a re-calibration moved the statistics of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fl_bn.federation.recalibration import Pass
from fl_bn.federation.record import RoundRecord
from fl_bn.run.config import RunConfig
from fl_bn.run.palette import MAP, STYLE, colour
from fl_bn.run.pictures import axis_of
from fl_bn.task import CLASSIFICATION, Task

NAMED = 12  # the most layers in a legend; if there are more, colours show only their order


def draw_passes(config: RunConfig, passes: Sequence[Pass], records: Sequence[RoundRecord], path: Path, task: Task = CLASSIFICATION) -> None:
    """Draw how far each pass moved the statistics of each layer, on a logarithmic axis.

    If the run has no training rounds, a panel above shows the task's metric after each pass.
    """
    evaluated = [r for r in records if task.metric in r.evaluation] if config.rounds == 0 else []
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(
            2 if evaluated else 1, 1, figsize=(7, 5.6 if evaluated else 3.6), sharex=True, squeeze=False, layout="constrained",
            height_ratios=(2, 3) if evaluated else None,
        )  # fmt: skip
        top, bottom = all_axes[0, 0], all_axes[-1, 0]
        if evaluated:
            scale = task.scale()
            values = [scale * r.evaluation[task.metric] for r in evaluated]
            top.plot([r.round for r in evaluated], values, "o-", ms=4, color=colour(0))
            for i in {0, len(evaluated) - 1}:
                where, ha = ((0, 8), "left") if i == 0 else ((0, 8), "right")
                shown = f"{values[i]:.1f} %" if scale == 100 else f"{values[i]:.4g}"
                top.annotate(shown, (evaluated[i].round, values[i]), where, textcoords="offset points", ha=ha, color=colour(0))
            top.set_ylabel(axis_of(task, "test "))
            if scale == 100:
                top.set(ylim=(0, 110), yticks=range(0, 101, 25))
        _movements(bottom, passes)
        bottom.set(xlabel="pass (0: as it came)" if evaluated else "statistics-only pass before round 1")
        top.set_title(f"re-calibration: {config.model} on {config.dataset}, {config.clients} clients, seed {config.seed}")
        figure.savefig(path)
        plt.close(figure)


def _movements(axes: Axes, passes: Sequence[Pass]) -> None:
    layers = [movement.layer for movement in passes[0].movements]
    moved = np.array([[movement.mean for movement in one.movements] for one in passes])  # (passes, layers)
    positive = moved[np.isfinite(moved) & (moved > 0)]
    floor = 10 ** (math.floor(math.log10(positive.min())) - 1) if positive.size else 1e-8
    numbers = [one.number for one in passes]
    for index, layer in enumerate(layers):
        shade = plt.get_cmap(MAP)(index / max(1, len(layers) - 1) * 0.9)
        values = moved[:, index]
        axes.plot(numbers, np.maximum(values, floor), "o-", ms=4, lw=1.2, color=shade, label=layer or "model", clip_on=False)
        still = values <= 0
        axes.plot(np.array(numbers)[still], np.full(still.sum(), floor), "o", ms=6, color="white", markeredgecolor=shade, clip_on=False)
    axes.set(yscale="log", xlim=(-0.2 if len(passes) > 1 else 0.5, numbers[-1] + 0.3), ylabel="largest move of a mean (sd)")
    axes.set_xticks(range(numbers[-1] + 1) if numbers[-1] <= 25 else range(0, numbers[-1] + 1, 5))
    axes.set_ylim(bottom=floor)
    axes.annotate("hollow: not moved by a bit", (0, 0), (5, 6), xycoords="axes fraction", textcoords="offset points", fontsize=7)
    if len(layers) <= NAMED:
        axes.legend(frameon=False, title="layer", fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.set_title(f"{len(layers)} layers, the first dark, the last light", fontsize=8)
