"""Provide the parts that all pictures of a report share: panels, legends, axes, and files."""

from __future__ import annotations

import hashlib
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fl_bn.run.palette import INK, STYLE

LOOK: Any = STYLE | {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": "#808080",
    "axes.titlesize": 9.5, "svg.fonttype": "path", "svg.hashsalt": "fl-bn",
    "text.parse_math": False,
}  # fmt: skip
LEGEND = 26  # the most letters in a line of the legend
PAGE, NARROWEST = 13.9, 2.2  # inches: the width of a page (1000 pixels), and the smallest width of a panel


@dataclass(frozen=True)
class Picture:
    """Hold a picture, which is drawn when it is needed.

    Attributes:
        name: The name of the file, without suffix.
        caption: The text below the picture.
        alt: The content of the picture in words, for people who cannot see it.
        draw: The function that draws the picture.
    """

    name: str
    caption: str
    alt: str
    draw: Callable[[], Figure]

    @cached_property
    def figure(self) -> Figure:
        """Return the figure. It is drawn and laid out once for all files, since this takes most of the time."""
        with matplotlib.rc_context(LOOK):
            figure = self.draw()
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        return figure

    def save(self, folder: Path, kinds: Sequence[str]) -> list[Path]:
        """Save the picture in several formats.

        Args:
            folder: The folder of the files.
            kinds: The formats: ``png``, ``svg`` or ``pdf``.

        Returns:
            The paths of the files.
        """
        made = []
        for kind in kinds:
            undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
            made.append(folder / f"{self.name}.{kind}")
            with matplotlib.rc_context(LOOK):
                self.figure.savefig(made[-1], metadata=undated, facecolor="white")
        return made

    def inline(self) -> str:
        """Return the picture as an ``<svg>`` element for a page.

        Its ids are unique on the page, and its lines and texts have the text colour of the page.
        """
        target = io.StringIO()
        with matplotlib.rc_context(LOOK):
            nothing: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
            self.figure.savefig(target, format="svg", transparent=True, metadata=nothing)
        text = target.getvalue()
        text = text[text.index("<svg") :].strip()
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', text)[0])  # in points; the size below makes 9 points 9 to 13 pixels
        size = f"min-width:{width * 1.0:.0f}px;max-width:{width * 1.4:.0f}px"
        text = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" style="{size}">', text, count=1)
        own = "p" + hashlib.sha256(text.encode()).hexdigest()[:10]
        text = re.sub(r'\bid="', f'id="{own}-', text)
        text = re.sub(r'(xlink:)?href="#', f'href="#{own}-', text).replace("url(#", f"url(#{own}-").replace("xlink:href", "href")
        return text.replace(INK, "currentColor")


@contextmanager
def panels(
    names: Sequence[str | None], legend: Sequence[str] = (), size: tuple[float, float] | None = None, across: int = 0
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make a figure with several panels.

    Args:
        names: The titles of the panels; None leaves a gap.
        legend: The texts of the legend, for which room is left to the right of the panels.
        size: The width and height of a panel in inches; None: the default. Panels that would not fit on the page are
            made narrower.
        across: The number of panels side by side; 0: chosen by the number of panels.

    Yields:
        The figure and its panels, without the gaps.
    """
    across = min(across, max(1, len(names))) or columns_of(len(names))
    down = -(-max(1, len(names)) // across)
    each = size or ((6.2, 4.0) if len(names) == 1 else (3.4, 2.7))
    columns, lines = _columns(legend)
    height = max(down * each[1], 0.165 * lines + 0.4)
    width = min(each[0], max(NARROWEST, (PAGE - 2.3 * columns) / across))
    figure = Figure(figsize=(across * width + 2.3 * columns, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    made = []
    for axes, name in itertools.zip_longest(grid.flat, names):
        if name is None:
            axes.set_visible(False)
        else:
            axes.set_title(wrapped(name, 40 if across == 1 else 34))
            made.append(axes)
    yield figure, made


def columns_of(panels: int) -> int:
    """Return how many panels to draw side by side.

    Up to three panels are drawn in one line. More panels are drawn in lines of two, three or four, with the fewest gaps.
    """
    return max(1, panels) if panels <= 3 else min((3, 4, 2), key=lambda across: -panels % across)


def legend(figure: Figure, panel: Sequence[Axes], rows: Mapping[str, str]) -> None:
    """Draw one legend for all panels, to the right of the panels.

    Args:
        figure: The figure.
        panel: The panels.
        rows: Row -> its text, in the order of the legend. Rows that no panel shows are left out.
    """
    handles: dict[str, Any] = {}
    for axes in panel:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    texts = {row: text for row, text in rows.items() if row in handles}
    if texts:
        columns, _ = _columns(list(texts.values()))
        lines = [wrapped(text, LEGEND) for text in texts.values()]
        figure.legend([handles[row] for row in texts], lines, loc="outside right upper", handlelength=3.2, ncols=columns, fontsize=8)


def _columns(legend: Sequence[str]) -> tuple[int, int]:
    """Return the number of columns of a legend with these texts, and the number of lines in the longest column."""
    heights = [wrapped(text, LEGEND).count("\n") + 1.3 for text in legend]
    columns = -(-int(sum(heights)) // 40) if heights else 0
    each = -(-len(heights) // max(1, columns))
    return columns, int(max((sum(heights[n : n + each]) for n in range(0, len(heights), max(1, each))), default=0)) + 1


def wrapped(text: str, width: int) -> str:
    """Break ``text`` into lines of at most ``width`` letters, but not at hyphens."""
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False) or [text])


def logarithmic(axes: Axes, x: bool = False) -> None:
    """Make the vertical axis (``x``: the horizontal one) logarithmic, with plain numbers at its ticks."""
    (axes.set_xscale if x else axes.set_yscale)("log")
    axis = axes.xaxis if x else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def first_of_lines(panel: Sequence[Axes]) -> list[Axes]:
    """Return the leftmost panel of every line of panels."""
    return [axes for axes in panel if (place := axes.get_subplotspec()) is not None and place.is_first_col()]


def percent_limits(panel: Sequence[Axes]) -> None:
    """Give all panels the same vertical range, within 0 and 100."""
    lows, highs = zip(*(axes.get_ylim() for axes in panel), strict=True)
    for axes in panel:
        axes.set_ylim(max(-1.0, min(lows)), min(101.0, max(highs)))


def same_limits(panel: Sequence[Axes]) -> None:
    """Give all panels the same vertical range."""
    lows, highs = zip(*(axes.get_ylim() for axes in panel), strict=True)
    for axes in panel:
        axes.set_ylim(min(lows), max(highs))


def in_words(values: Mapping[str, str]) -> str:
    """Join names and values to one text, as ``NAME VALUE; NAME VALUE``."""
    return "; ".join(f"{name} {value}" for name, value in values.items())
