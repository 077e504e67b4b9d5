"""Define colours, line styles and markers of all pictures, also for colour-blind readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK = "#1d1e21"  # colour of text and axes
# Okabe and Ito's colours, without the yellow, in an order in which neighbours differ in brightness; all show on white and on black
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", INK, "#9B59B6", "#CC79A7", "#8A7A2F")
SHADES = (*COLOURS, "#A8A8A8")  # colours of areas, which have no dashes or markers to tell them apart: ten, for ten classes
LINES: Sequence[Any] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX*<>"
QUIET = "#6b6f76"  # colour of secondary things: limits, remarks, lines to compare with
MAP, DIFFERENCE = "viridis", "RdBu"  # colour maps of heat maps: values (even steps of brightness), differences (blue is better)
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 130, "font.size": 9,
    "axes.axisbelow": True, "legend.frameon": False, "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
    "image.cmap": MAP, "axes.titlesize": 9.5, "text.parse_math": False, "grid.color": "#808080",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip


def colour(index: int) -> str:
    """Return the colour of the line with this index, out of ``len(COLOURS)``."""
    return COLOURS[index % len(COLOURS)]


def line(index: int) -> dict[str, Any]:
    """Return colour, dashes and marker of the line with this index, as arguments of ``plot``.

    They are the same in every picture, and differ for the first 180 indices.
    """
    look = {"linestyle": LINES[index % len(LINES)], "marker": MARKERS[index % len(MARKERS)]}
    return {"color": colour(index), **look, "lw": 1.4, "ms": 4.2}
