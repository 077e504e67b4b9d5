"""Convert the table of results to Markdown, and all runs to one tidy CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence

from fl_bn.report.cells import Cell
from fl_bn.report.layout import Entry, Problem, Table, as_text
from fl_bn.report.settings import SEED, label


def to_markdown(table: Table) -> str:
    """Return the table as Markdown, with its caption and a list of the runs that it leaves out."""
    columns = table.layout.columns
    lines = [f"# {_md(table.layout.settings.title)}", ""]
    lines += [f"| {_md(table.corner)} | {' | '.join(map(_md, columns))} |", "|---|" + "---:|" * len(columns)]
    for row, entries in table.entries.items():
        parts = [entry_text(table, row, column, "**{}**", _md) for column in entries]
        lines.append(f"| {_md(row)} | {' | '.join(parts)} |")
    lines += ["", _md(table.caption), ""]
    if table.problems:
        lines += [f"Runs that are not in the numbers ({len(table.problems)}):", ""]
        lines += [f"- {_md(problem.cell.name)}: {_md(problem_text(problem))}" for problem in table.problems]
        lines.append("")
    return "\n".join(lines)


def runs_csv(cells: Sequence[Cell]) -> str:
    """Return all runs as one tidy CSV table, with a line per run and round.

    The columns are the run, its values on the axes, its state, the round, and what the round measured, as in the run's own
    ``rounds.csv``. A run without a round has one line.
    """
    axes = [*dict.fromkeys(axis for cell in cells for axis in cell.axes if axis != SEED), SEED]
    single = (name for cell in cells for row in cell.rows for name, value in row.items() if not isinstance(value, list | dict))
    measured = list(dict.fromkeys(("round", *single)))
    own = ("run", "status", "error", *measured)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *(f"axis-{axis}" if axis in own else axis for axis in axes), "status", "error", *measured])
    for cell in cells:
        values = [label(cell.axes[axis]) if axis in cell.axes else "" for axis in axes]
        for row in cell.rows or ({},):
            writer.writerow([cell.name, *values, cell.status, cell.error, *(row.get(name) for name in measured)])
    return text.getvalue()


def problem_text(problem: Problem) -> str:
    """Return the reason why the table leaves a run out, as one line of text."""
    status, why = problem.cell.status, " ".join(problem.why.split())
    return why if problem.cell.finished or why.startswith(status) else f"{status}: {why}"


def number(table: Table, entry: Entry) -> tuple[str, str, str]:
    """Return the parts of an entry: the mean ``45.2``, the deviation ``(0.3)``, and the number of seeds.

    The number of seeds is ``2 of 3`` if runs lack a value, else ``n=3``. It is empty if no run lacks a value and the caption
    states the same number. For an entry without values, the first part is
    a text such as ``failed``, and the others are empty.
    """
    if not entry.values:
        return entry.instead, "", ""
    metric = table.layout.metric
    spread = f"({as_text(entry.std, metric)})" if math.isfinite(entry.std) else ""
    whole = len(entry.values) == entry.runs
    count = "" if whole and entry.runs == table.seeds else f"n={entry.runs}" if whole else f"{len(entry.values)} of {entry.runs}"
    return as_text(entry.mean, metric), spread, count


def entry_text(table: Table, row: str, column: str, bold: str, escape: Callable[[str], str]) -> str:
    """Return the text of an entry: mean, deviation, number of seeds and the paper's number.

    Args:
        table: The table.
        row: The row of the entry.
        column: The column of the entry.
        bold: The form of the best mean of a column, with ``{}`` in the place of the number.
        escape: The function that makes any text harmless in the format.
    """
    entry = table.entries[row][column]
    mean, spread, count = number(table, entry)
    text = bold.format(escape(mean)) if (row, column) in table.best else escape(mean)
    text += f" {escape(spread)}" if spread else ""
    text += escape(f", {count}") if count else ""
    return text + (f" [{escape(entry.paper)}]" if entry.paper else "")


def _md(text: str) -> str:
    """Escape the special characters of Markdown and HTML in ``text``, and join its lines."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join("\\" + letter if letter in "\\`*_[]|" else letter for letter in text)
