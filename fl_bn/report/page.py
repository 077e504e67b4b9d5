"""Make the pages of reports: HTML files that load nothing else. Their parts are files in ``templates``."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import compress
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fl_bn.report.cells import Cell
from fl_bn.report.formats import number, problem_text
from fl_bn.report.layout import LEFT_OUT, Layout, Table
from fl_bn.report.pictures import Picture
from fl_bn.report.program import Program
from fl_bn.report.settings import SEED, Settings, label

COMMANDS = ("fl-bn sweep {folder}/sweep.toml", "fl-bn report {folder}")
OF_THE_RUN = (SEED, "name", "output", "resume", "pictures")  # run-config keys in which all runs differ, so they are not listed


@dataclass(frozen=True)
class Figure:
    """Hold a picture of the page.

    Attributes:
        name: The name of the picture, which is also its anchor.
        caption: The text below the picture.
        svg: The picture as an ``<svg>`` element with its alternative text. fl-bn makes it, so it is not escaped.
    """

    name: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Differing:
    """List the run-config keys in which the runs of a sweep differ.

    A key with the name of an axis is left out if it has the same values as the axis.

    Attributes:
        axes: The axes of the sweep.
        keys: The run-config keys.
        lines: For each combination of values on the axes: these values, and the values of the keys. ``–``: the runs have no
            such key.
    """

    axes: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Report:
    """Hold the report of a sweep, as the templates of pages show it.

    Attributes:
        layout: The runs by row and column.
        table: The table of results.
        cells: All runs.
        pictures: The pictures.
        folder: The name of the sweep's folder.
        id: A prefix that makes the ids of this report unique on a page with several reports.
    """

    layout: Layout
    table: Table
    cells: tuple[Cell, ...]
    pictures: tuple[Picture, ...]
    folder: str
    id: str = ""

    @property
    def settings(self) -> Settings:
        """Return the settings of the report."""
        return self.layout.settings

    @property
    def count(self) -> int:
        """Return the number of runs."""
        return len(self.cells)

    @property
    def state(self) -> str:
        """Return a sentence on how many runs are finished, failed and so on."""
        done = sum(cell.finished for cell in self.cells)
        kinds = list(dict.fromkeys(cell.status for cell in self.cells if not cell.finished))
        others = [f"{sum(cell.status == kind for cell in self.cells)} {kind}" for kind in kinds]
        return f"{done} of {self.count} runs finished{', ' if others else ''}{', '.join(others)}."

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the rows of the table, each with its entries, for the template."""
        made = []
        for row, entries in self.table.entries.items():
            cells = []
            for column, entry in entries.items():
                mean, std, count = number(self.table, entry)
                value = f"{entry.mean:.6g}" if entry.values else ""
                best = (row, column) in self.table.best
                kind = "left-out" if entry.instead == LEFT_OUT else "none"
                cells.append({"mean": mean, "std": std, "count": count, "value": value, "best": best, "paper": entry.paper, "kind": kind})
            made.append({"row": row, "cells": cells})
        return made

    @property
    def figures(self) -> list[Figure]:
        """Return the pictures with their alternative texts."""
        return [Figure(p.name, p.caption, _labelled(p.inline(), p.alt)) for p in self.pictures]

    @property
    def problems(self) -> list[dict[str, str]]:
        """Return the runs that the table leaves out, each with its values on the axes and the reason."""
        return [
            {
                "name": p.cell.name,
                "where": ", ".join(f"{axis} {label(value)}" for axis, value in p.cell.axes.items()),
                "why": problem_text(p),
            }
            for p in self.table.problems
        ]

    @property
    def common(self) -> list[tuple[str, str]]:
        """Return pairs of a run-config key that has the same value in all runs, and this value."""
        configs = [cell.config for cell in self.cells if cell.config]
        first = configs[0] if configs else {}
        return [
            (key, _value(value))
            for key, value in first.items()
            if key not in OF_THE_RUN and all(key in config and config[key] == value for config in configs)
        ]

    @property
    def differing(self) -> Differing:
        """Return the run-config keys in which runs differ."""
        common = {key for key, _ in self.common}
        cells = [cell for cell in self.cells if cell.config]
        keys = tuple(dict.fromkeys(key for cell in cells for key in cell.config if key not in common and key not in OF_THE_RUN))
        axes = tuple(axis for axis in (self.layout.row_axis, *self.layout.rest) if axis)
        lines = []
        for where, group in self.layout.by(axes, [cell for cell in self.layout.cells if cell.config]).items():
            lines.append((where, tuple(" or ".join(dict.fromkeys(_value(cell.config.get(key, "–")) for cell in group)) for key in keys)))
        says = [key not in axes or any(where[axes.index(key)] != values[n] for where, values in lines) for n, key in enumerate(keys)]
        names = tuple(f"{key} (run config)" if key in axes else key for key, more in zip(keys, says, strict=True) if more)
        return Differing(axes, names, tuple((where, tuple(compress(values, says))) for where, values in lines))

    @property
    def environment(self) -> list[tuple[str, str]]:
        """Return pairs of a key in the runs' ``environment.json``, such as ``python``, and its different values as text."""
        found: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for key, value in cell.environment.items():
                found.setdefault(key, {})[_value(value)] = None
        return [(key, " or ".join(value for value in values if value) or "–") for key, values in found.items()]

    @property
    def commands(self) -> list[str]:
        """Return the commands that repeat the sweep and its report."""
        return [command.format(folder=_quoted(self.folder)) for command in COMMANDS]


class Compared(NamedTuple):
    """Hold the texts of a comparison on the page of a claim.

    Attributes:
        comparison: The comparison in words.
        difference: Our difference, with its confidence interval.
        paper: The paper's own difference.
        detectable: The smallest true difference that the test would find.
        seeds: The number of seeds.
        p: The p-value.
        state: The result, such as ``held``.
    """

    comparison: str
    difference: str
    paper: str
    detectable: str
    seeds: str
    p: str
    state: str


@dataclass(frozen=True)
class Answered:
    """Hold the texts of a question about the cause of a result, with its answer.

    Attributes:
        asks: The question.
        says: The answer.
        compared: The comparisons on which the answer is based.
    """

    asks: str
    says: str
    compared: tuple[Compared, ...]


@dataclass(frozen=True)
class Statement:
    """Hold the texts at the top of the page of a claim, which is a statement of a paper that our runs test.

    Attributes:
        claim: The claim.
        paper: The paper that makes the claim.
        verdict: The verdict of our runs.
        words: Further texts, each with a title.
        compared: The comparisons on which the verdict is based.
        commands: The commands that make the runs and the page.
        whys: Questions about the cause of the result.
    """

    claim: str
    paper: str
    verdict: str
    words: tuple[tuple[str, str], ...]
    compared: tuple[Compared, ...]
    commands: tuple[str, ...]
    whys: tuple[Answered, ...] = ()


@dataclass(frozen=True)
class Listed:
    """Hold one experiment on an index page: the report of a sweep, the results of a program, or an error.

    Attributes:
        id: The unique id on the page.
        title: The title.
        report: The report of the sweep; None: it is not a sweep, or has no report.
        link: The path of the experiment's own page, relative to the index page; empty: it has no page.
        error: Why there is no report; empty: there is one.
        program: The results of the program; None: the experiment is a sweep.
    """

    id: str
    title: str
    report: Report | None = None
    link: str = ""
    error: str = ""
    program: Program | None = None


def report_page(report: Report) -> str:
    """Return the page of a sweep."""
    return _page(report, None, [])


def claim_page(report: Report, statement: Statement) -> str:
    """Return the page of a claim: the claim and its verdict, then the report of its runs."""
    return _page(report, statement, [("verdict", "Verdict"), *([("why", "Why")] if statement.whys else [])])


def _page(report: Report, statement: Statement | None, contents: list[tuple[str, str]]) -> str:
    contents = [*contents, ("results", "Results")]
    contents += [("figures", "Figures")] if report.pictures else []
    contents += [("problems", "Runs that are not in the numbers")] if report.problems else []
    contents += [("settings", "Settings"), ("again", "To do it again")]
    return _render("report.html", {"title": report.settings.title, "report": report, "statement": statement, "contents": contents})


def index_page(title: str, reports: Sequence[Listed]) -> str:
    """Return a page with the reports of several experiments."""
    return _render("index.html", {"title": title, "reports": reports})


def program_page(program: Program) -> str:
    """Return the page of an experiment that is a program, and not a sweep."""
    return _render("program.html", {"title": program.title, "one": program})


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Fill ``values`` into the file ``template`` of ``fl_bn/report/templates``, and return the page."""
    environment = Environment(
        loader=PackageLoader("fl_bn.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = (files("fl_bn.report").joinpath("templates", name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"css": Markup(style), "script": Markup(script), "hash": Markup(digest)}
    return environment.get_template(template).render({**own, **values})


def _labelled(svg: str, alt: str) -> Markup:
    return Markup(svg.replace("<svg ", f'<svg aria-label="{html.escape(alt)}" ', 1))


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(of)}" for key, of in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _quoted(folder: str) -> str:
    return folder if all(c.isalnum() or c in "-_./+=" for c in folder) else "'" + folder.replace("'", "'\\''") + "'"
