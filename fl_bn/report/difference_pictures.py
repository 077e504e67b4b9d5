"""A picture of many paired differences, each with its confidence interval, in groups that have a name."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fl_bn.report.pictures import Picture
from fl_bn.run.palette import COLOURS, QUIET

STATES = (COLOURS[2], COLOURS[4], QUIET)  # of what speaks for, speaks against, and decides nothing
LINEAR = 10  # points from zero; beyond, the axis is logarithmic
TICKS = (-50, -20, -10, -5, 0, 5, 10, 20, 50)
LETTERS, LINES = 52, 3  # of a group's name: per line, and lines that its band has room for
GAP = 1.2  # between groups, in comparisons


@dataclass(frozen=True)
class Difference:
    """``mean`` and ``half`` of its confidence interval (NaN: unknown) in points; ``within``: the distance that was claimed, if one was."""

    name: str
    mean: float
    half: float
    state: str
    within: float | None = None


def differences(name: str, groups: Mapping[str, Sequence[Difference]], states: tuple[str, str, str]) -> Picture:
    """``states``: what ``Difference.state`` may be, in the order of ``STATES``; a claimed distance is two short bars."""
    ink = dict(zip(states, STATES, strict=True))
    bands = [max(len(rows), LINES) + GAP for rows in groups.values()]

    def draw() -> Figure:
        figure = Figure(figsize=(9.0, 1.0 + 0.13 * sum(bands)), layout="constrained")
        axes = figure.subplots()
        top, middles = 0.0, []
        for n, (rows, band) in enumerate(zip(groups.values(), bands, strict=True)):
            if n % 2:
                axes.axhspan(top, top + band, color=QUIET, alpha=0.08, lw=0)
            middles.append(top + band / 2)
            for at, row in enumerate(rows, 1):
                y = middles[-1] + at - (len(rows) + 1) / 2
                half = 0.0 if math.isnan(row.half) else row.half
                axes.errorbar(row.mean, y, xerr=half, fmt="o", color=ink[row.state], ms=3.5, lw=1.3)
                if row.within is not None:
                    axes.plot([-row.within, row.within], [y, y], "|", color=QUIET, ms=7)
            top += band
        axes.axvline(0, color=QUIET, lw=1)
        for state, colour in ink.items():
            axes.plot([], [], "o", color=colour, label=state)
        axes.set_yticks(middles, [textwrap.fill(group, LETTERS) for group in groups], fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_ylim(top, 0)
        axes.set_xscale("symlog", linthresh=LINEAR)
        axes.set_xticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("a comparison's difference in points of test accuracy: mean and 95 % interval over seeds")
        figure.legend(loc="outside upper right", ncols=3, fontsize=8)
        return figure

    said = "; ".join(f"{row.name}: {row.mean:+.1f}, {row.state}" for rows in groups.values() for row in rows)
    return Picture(name, "Differences of every comparison, by claim.", f"Points with intervals. {said}.", draw)
