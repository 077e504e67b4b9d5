"""Convert the table of results to CSV, Markdown and LaTeX, and all runs to one tidy CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from fl_bn.report.cells import Cell
from fl_bn.report.layout import Entry, Problem, Table, as_text
from fl_bn.report.settings import SEED, label

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "[": "{[}", "]": "{]}", "*": "{*}",  # brackets and stars after \\ would be read as its options
    "–": "--", "±": r"$\pm$", '"': "''",
}  # fmt: skip


def to_csv(table: Table) -> str:
    """Return the table as CSV. Each column of the table becomes three: mean, standard deviation and number of seeds.

    If the sweep file gives results of a paper (``has_paper``), a further column has the paper's value. Means and standard
    deviations have six significant digits. Those that are missing or not finite are empty.
    """
    columns = table.layout.columns
    kinds = ("mean", "std", "seeds", *(("paper",) if table.has_paper else ()))
    lines: list[list[Any]] = [[table.layout.row_axis, *(f"{column} {kind}" for column in columns for kind in kinds)]]
    for row, entries in table.entries.items():
        values = [(_full(e.mean), _full(e.std), len(e.values), e.paper)[: len(kinds)] for e in (entries[c] for c in columns)]
        lines.append([row, *(value for group in values for value in group)])
    return _csv(lines)


def to_markdown(table: Table) -> str:
    """Return the table as Markdown, with its caption and a list of the runs that it leaves out."""
    columns = table.layout.columns
    lines = [f"| {_md(table.corner)} | " + " | ".join(map(_md, columns)) + " |", "|---|" + "---:|" * len(columns)]
    for row, entries in table.entries.items():
        parts = [_cell(table, entries[column], (row, column) in table.best, "**{}**") for column in columns]
        lines.append(f"| {_md(row)} | " + " | ".join(parts) + " |")
    notes = [_md(table.caption), *([f"Runs that are not in the numbers ({len(table.problems)}):"] if table.problems else [])]
    wrong = [f"- {_md(p.cell.name)}: {_md(problem_text(p))}" for p in table.problems]
    elsewhere = [_md(f"The paper's numbers without a place here: {'; '.join(table.elsewhere)}.")] if table.elsewhere else []
    head = [f"# {_md(table.layout.settings.title)}", "", *lines, ""]
    return "\n".join([*head, "\n\n".join([*notes, *(["\n".join(wrong)] if wrong else []), *elsewhere]), ""])


def to_latex(table: Table) -> str:
    r"""Return the table as a LaTeX ``table`` that needs ``\\usepackage{booktabs}``."""
    columns = table.layout.columns
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex(table.layout.settings.title)}. {latex(table.caption)}}}",
    ]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule"]
    if table.layout.rest:
        lines.append(
            rf"& \multicolumn{{{len(columns)}}}{{c}}{{{latex(', '.join(table.layout.rest))}}} \\ \cmidrule(l){{2-{len(columns) + 1}}}"
        )
    lines += [f"{latex(table.layout.row_axis)} & {' & '.join(map(latex, columns))} \\\\", r"\midrule"]
    for row, entries in table.entries.items():
        parts = [_cell(table, entries[column], (row, column) in table.best, r"\textbf{{{}}}", latex) for column in columns]
        lines.append(f"{latex(row)} & {' & '.join(parts)} \\\\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    lines += [f"% not from {comment(p.cell.name)}: {comment(problem_text(p))}" for p in table.problems]
    return "\n".join(lines) + "\n"


def runs_csv(cells: Sequence[Cell]) -> str:
    """Return all runs as one tidy CSV table, with a line per run and round.

    The columns are the run, its values on the axes, its state, the round, and what the round measured, as in the run's own
    ``rounds.csv``. A run without a round has one line.
    """
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.axes if axis != SEED)) + [SEED]
    single = (name for cell in cells for row in cell.rows for name, value in row.items() if not isinstance(value, list | dict))
    measured = list(dict.fromkeys(("round", *single)))
    own = ("run", "status", "error", *measured)
    lines: list[Sequence[Any]] = [["run", *(f"axis-{axis}" if axis in own else axis for axis in axes), "status", "error", *measured]]
    for cell in cells:
        where = [cell.name, *(label(cell.axes[axis]) if axis in cell.axes else "" for axis in axes), cell.status, cell.error]
        lines += [[*where, *(row.get(name) for name in measured)] for row in cell.rows or ({},)]
    return _csv(lines)


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


def latex(text: str) -> str:
    """Escape the special characters of LaTeX in ``text``, and join its lines."""
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def comment(text: str) -> str:
    """Join the lines of ``text``, since a comment of LaTeX ends at a line break."""
    return " ".join(text.split())


def _cell(table: Table, entry: Entry, best: bool, bold: str, escape: Any = None) -> str:
    escape = escape or _md
    mean, spread, count = number(table, entry)
    parts = [
        bold.format(escape(mean)) if best else escape(mean),
        escape(spread),
        escape(count and f", {count}"),
        entry.paper and f"[{escape(entry.paper)}]",
    ]
    return " ".join(part for part in parts if part).replace(" ,", ",")


def _md(text: str) -> str:
    """Escape the special characters of Markdown and HTML in ``text``, and join its lines."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join("\\" + letter if letter in "\\`*_[]|" else letter for letter in text)


def _full(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
