"""Convert the table of results to Markdown, and all runs to one tidy CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fl_bn.app.report.cells import Cell
from fl_bn.app.report.layout import Entry, Table, as_text
from fl_bn.app.report.settings import SEED, label
from fl_bn.support.durable import as_csv


def to_markdown(table: Table) -> str:
    """Return the table as Markdown, with its caption and the runs that it leaves out."""
    columns = table.layout.columns
    lines = [f"# {_md(table.layout.settings.title)}", ""]
    lines += [f"| {_md(table.corner)} | {' | '.join(map(_md, columns))} |", "|---|" + "---:|" * len(columns)]
    for row, entries in texts(table):
        parts = [f"{f'**{_md(mean)}**' if best else _md(mean)}{_md(rest)}" for best, mean, rest in entries]
        lines.append(f"| {_md(row)} | {' | '.join(parts)} |")
    lines += ["", _md(table.caption), ""]
    if table.problems:
        lines += [f"Runs that are not in the numbers ({len(table.problems)}):", ""]
        lines += [f"- {_md(name)}: {_md(why)}" for name, why in table.problems.items()]
        lines.append("")
    return "\n".join(lines)


def runs_csv(cells: Sequence[Cell]) -> str:
    """Return all runs as one tidy CSV table, with a line per run and round.

    It has the run, its values on the axes, its state, the round, and the columns of
    ``rounds.csv``.
    """
    axes = [*dict.fromkeys(axis for cell in cells for axis in cell.axes if axis != SEED), SEED]
    single = (name for cell in cells for row in cell.rows for name, value in row.items() if not isinstance(value, list | dict))
    measured = list(dict.fromkeys(("round", *single)))
    own = ("run", "status", "error", *measured)
    lines: list[list[object]] = [["run", *(f"axis-{axis}" if axis in own else axis for axis in axes), "status", "error", *measured]]
    for cell in cells:
        values = [label(cell.axes[axis]) if axis in cell.axes else "" for axis in axes]
        for row in cell.rows or ({},):
            lines.append([cell.name, *values, cell.status, cell.error, *(row.get(name) for name in measured)])
    return as_csv(lines, "\n")


def texts(table: Table) -> list[tuple[str, list[tuple[bool, str, str]]]]:
    """Return each row's name and entries: whether it is the column's best, the mean, and the rest."""
    return [
        (row, [((row, column) in table.best, *_text(table, entry)) for column, entry in entries.items()])
        for row, entries in table.entries.items()
    ]


def _text(table: Table, entry: Entry) -> tuple[str, str]:
    """Return the mean as text, and its rest: deviation, unusual number of seeds, paper's number.

    For an entry without values, the first text is such as ``failed``.
    """
    metric, count = table.layout.metric, len(entry.values)
    mean, rest = as_text(entry.mean, metric) if count else entry.instead, ""
    if math.isfinite(entry.std):
        rest += f" ({as_text(entry.std, metric)})"
    if 0 < count < entry.runs:
        rest += f", {count} of {entry.runs}"
    elif count and count != table.seeds:
        rest += f", n={count}"
    return mean, rest + (f" [{entry.paper}]" if entry.paper else "")


def _md(text: str) -> str:
    """Escape ``text`` for Markdown and HTML, and join its lines."""
    text = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join("\\" + letter if letter in "\\`*_[]|" else letter for letter in text)
