"""Make a report a page: one HTML file that loads nothing else, from anywhere. Its parts are files in ``templates``."""

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
OF_THE_RUN = (SEED, "name", "output", "resume", "pictures")  # config keys in which runs differ whatever they are


@dataclass(frozen=True)
class Figure:
    """Hold a picture of the page.

    Attributes:
        name: Its name, which becomes an anchor.
        caption: The text below it.
        svg: The picture, with its alternative text inside. It is ours, and is not escaped again.
    """

    name: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Differing:
    """List the config keys in which runs differ. A key that only repeats an axis of its name is left out.

    Attributes:
        axes: The axes of the sweep.
        keys: The config keys.
        lines: By row, the values of axes and keys; ``–``: no such key.
    """

    axes: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Report:
    """Hold what the templates show of a sweep.

    Attributes:
        layout: How runs are laid out in rows and columns.
        table: The table of results.
        cells: The runs.
        pictures: The pictures.
        folder: The sweep's folder.
        id: Keeps apart the reports of one page.
    """

    layout: Layout
    table: Table
    cells: tuple[Cell, ...]
    pictures: tuple[Picture, ...]
    folder: str
    id: str = ""

    @property
    def settings(self) -> Settings:
        """Return how the sweep is to be shown."""
        return self.layout.settings

    @property
    def count(self) -> int:
        """Return the number of runs."""
        return len(self.cells)

    @property
    def state(self) -> str:
        """Return a sentence on how many runs are finished."""
        done = sum(cell.finished for cell in self.cells)
        kinds = list(dict.fromkeys(cell.status for cell in self.cells if not cell.finished))
        others = [f"{sum(cell.status == kind for cell in self.cells)} {kind}" for kind in kinds]
        return f"{done} of {self.count} runs finished{', ' if others else ''}{', '.join(others)}."

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the rows of the table, each with its cells."""
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
        """Return the runs that are not in the numbers, and why."""
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
        """Return the config keys that all runs share, with their values."""
        configs = [cell.config for cell in self.cells if cell.config]
        first = configs[0] if configs else {}
        return [
            (key, _value(value))
            for key, value in first.items()
            if key not in OF_THE_RUN and all(key in config and config[key] == value for config in configs)
        ]

    @property
    def differing(self) -> Differing:
        """Return the config keys in which runs differ."""
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
        """Return the machines and versions of the runs, each value once."""
        found: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for key, value in cell.environment.items():
                found.setdefault(key, {})[_value(value)] = None
        return [(key, " or ".join(value for value in values if value) or "–") for key, values in found.items()]

    @property
    def commands(self) -> list[str]:
        """Return the commands that do the sweep again."""
        return [command.format(folder=_quoted(self.folder)) for command in COMMANDS]


class Compared(NamedTuple):
    """Show a comparison, and what the seeds say about it.

    Attributes:
        comparison: What is compared.
        difference: The difference, with its interval.
        paper: The paper's own difference.
        detectable: The smallest difference that would be found.
        seeds: The number of seeds.
        p: The p-value.
        state: What the comparison shows.
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
    """Show a question about a cause, its answer, and the comparisons that it rests on.

    Attributes:
        asks: The question.
        says: The answer.
        compared: The comparisons.
    """

    asks: str
    says: str
    compared: tuple[Compared, ...]


@dataclass(frozen=True)
class Statement:
    """Show what stands above the report of a claim.

    Attributes:
        claim: The claim.
        paper: Where it is from.
        verdict: What the runs say.
        words: Titles and texts.
        compared: The comparisons that the verdict rests on.
        commands: The commands that make the runs and the page.
        whys: Questions about causes.
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
    """Show one experiment on an index page.

    Attributes:
        id: Keeps it apart from the others.
        title: Its title.
        report: The report of a sweep.
        link: The path of its own page, relative to this one; empty: it has none.
        error: Why there is no report.
        program: The results of a program that is no sweep.
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
    """Return the page of a claim: the claim and its verdict, above the report of its runs."""
    return _page(report, statement, [("verdict", "Verdict"), *([("why", "Why")] if statement.whys else [])])


def _page(report: Report, statement: Statement | None, contents: list[tuple[str, str]]) -> str:
    contents = [*contents, ("results", "Results")]
    contents += [("figures", "Figures")] if report.pictures else []
    contents += [("problems", "Runs that are not in the numbers")] if report.problems else []
    contents += [("settings", "Settings"), ("again", "To do it again")]
    return _render("report.html", {"title": report.settings.title, "report": report, "statement": statement, "contents": contents})


def index_page(title: str, reports: Sequence[Listed]) -> str:
    """Return a page with several experiments."""
    return _render("index.html", {"title": title, "reports": reports})


def program_page(program: Program) -> str:
    """Return the page of a program that is no sweep."""
    return _render("program.html", {"title": program.title, "one": program})


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Return the page that the file ``template`` of ``fl_bn/report/templates`` makes of ``values``."""
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
