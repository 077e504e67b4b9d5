"""A picture of many paired differences, each with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from fl_bn.report.pictures import Picture
from fl_bn.run.palette import COLOURS, QUIET

STATES = (COLOURS[2], COLOURS[4], QUIET)  # of what speaks for, speaks against, and decides nothing
LINEAR = 10  # points from zero; beyond, the axis is logarithmic


@dataclass(frozen=True)
class Difference:
    """``mean`` and ``half`` of its confidence interval (NaN: unknown) in points; ``within``: the distance that was claimed, if one was."""

    name: str
    mean: float
    half: float
    state: str
    within: float | None = None


def differences(name: str, rows: Sequence[Difference], states: tuple[str, str, str]) -> Picture:
    """``states``: what ``Difference.state`` may be, in the order of ``STATES``; a claimed distance is two short bars."""
    ink = dict(zip(states, STATES, strict=True))

    def draw() -> Figure:
        figure = Figure(figsize=(9.0, 1.0 + 0.2 * len(rows)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=QUIET, lw=1)
        for n, row in enumerate(rows):
            half = 0.0 if math.isnan(row.half) else row.half
            axes.errorbar(row.mean, n, xerr=half, fmt="o", color=ink[row.state], ms=4, lw=1.4)
            if row.within is not None:
                axes.plot([-row.within, row.within], [n, n], "|", color=QUIET, ms=9)
        for state, colour in ink.items():
            axes.plot([], [], "o", color=colour, label=state)
        axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=7.5)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("left less right, points of test accuracy: mean and 95 % interval over seeds")
        axes.set_xscale("symlog", linthresh=LINEAR)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        figure.legend(loc="outside upper right", ncols=3, fontsize=8)
        return figure

    said = "; ".join(f"{row.name}: {row.mean:+.1f}, {row.state}" for row in rows)
    return Picture(name, "Differences of every comparison.", f"Points with intervals. {said}.", draw)
