"""Draw the papers' and this project's differences between two methods on one axis, grouped by claim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fl_bn.app.palette import COLOURS, QUIET
from fl_bn.app.pictures import Picture

# Colours and marks of comparisons that held, are contradicted, are smaller than the paper's, are undecided, and are not at scale.
STATES = (COLOURS[2], COLOURS[4], COLOURS[0], QUIET, QUIET)
MARKS = ("o", "o", "o", "o", "x")
INK = "black"  # the colour of the paper's difference
LINEAR = 10  # points; the axis is linear up to this value, and logarithmic beyond it
TICKS = (-50, -20, -10, -5, 0, 5, 10, 20, 50)
GAP = 1.6  # the height of a group's name, in lines


@dataclass(frozen=True)
class Difference:
    """Describe one line of the picture: the difference of a comparison, in points.

    Attributes:
        name: The comparison in words.
        mean: This project's difference.
        half: Half the width of the 95 % confidence interval of ``mean``; NaN if unknown.
        state: The state of the comparison, such as ``held``.
        within: The largest difference that the claim allows; None if the claim is about an order.
        paper: The paper's difference; None if the paper gives no numbers.
        exact: Whether the paper prints its numbers; if not, they were read off a figure.
    """

    name: str
    mean: float
    half: float
    state: str
    within: float | None = None
    paper: float | None = None
    exact: bool = True


def differences(name: str, groups: Mapping[str, Sequence[Difference]], states: tuple[str, str, str, str, str]) -> Picture:
    """Make the picture of all differences, one line for each, below the name of its group.

    Args:
        name: The name of the file, without suffix.
        groups: Name of a group -> its differences. Two short bars, on both sides of 0, mark ``Difference.within``.
        states: The values that ``Difference.state`` may have, in the order of ``STATES``.
    """
    ink, mark = dict(zip(states, STATES, strict=True)), dict(zip(states, MARKS, strict=True))
    lines = sum(len(rows) + GAP for rows in groups.values())

    def draw() -> Figure:
        figure = Figure(figsize=(9.5, 1.0 + 0.17 * lines), layout="constrained")
        axes = figure.subplots()
        top, ticks, names = 0.0, [], []
        for n, (group, rows) in enumerate(groups.items()):
            if n % 2:
                axes.axhspan(top, top + len(rows) + GAP, color=QUIET, alpha=0.08, lw=0)
            ticks.append(top + 0.9)
            names.append(group)
            for at, row in enumerate(rows):
                y = top + GAP + at + 0.3
                ticks.append(y)
                names.append(f"{row.name}   ")
                half = 0.0 if math.isnan(row.half) else row.half
                axes.errorbar(row.mean, y, xerr=half, fmt=mark[row.state], color=ink[row.state], ms=4, lw=1.3)
                if row.paper is not None:
                    axes.plot(row.paper, y, "D", mec=INK, mfc=INK if row.exact else "none", ms=4)
                if row.within is not None:
                    axes.plot([-row.within, row.within], [y, y], "|", color=QUIET, ms=8)
            top += len(rows) + GAP
        axes.axvline(0, color=QUIET, lw=1)
        axes.plot([], [], "D", color=INK, ms=4, label="the paper")
        axes.plot([], [], "D", mec=INK, mfc="none", ms=4, label="read off a figure")
        for state, colour in ink.items():
            axes.plot([], [], mark[state], color=colour, label=f"ours: {state}")
        axes.set_yticks(ticks, names, fontsize=7)
        for label in axes.get_yticklabels():
            if not label.get_text().endswith("   "):
                label.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(top, 0)
        axes.set_xscale("symlog", linthresh=LINEAR)
        axes.set_xticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("difference in points of test accuracy, ours with its 95 % interval;\nshort bars: the claimed distance")
        figure.legend(loc="outside upper right", ncols=3, fontsize=8)
        return figure

    return Picture(name, "The papers' differences and ours, by claim.", draw)
