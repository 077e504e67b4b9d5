"""A report as a page: one HTML file that asks for nothing else, from anywhere."""

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
    """``svg`` is ours, with its alternative text inside, and not escaped again."""

    name: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Differing:
    """The config keys in which runs differ, and their values (``-``: no such key) by row and column. A key that only repeats an axis of
    its name is left out."""

    axes: tuple[str, ...]
    keys: tuple[str, ...]
    lines: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Report:
    """What the templates show. ``id`` keeps apart the reports of one page."""

    layout: Layout
    table: Table
    cells: tuple[Cell, ...]
    pictures: tuple[Picture, ...]
    folder: str
    id: str = ""

    @property
    def settings(self) -> Settings:
        return self.layout.settings

    @property
    def count(self) -> int:
        return len(self.cells)

    @property
    def state(self) -> str:
        done = sum(cell.finished for cell in self.cells)
        kinds = list(dict.fromkeys(cell.status for cell in self.cells if not cell.finished))
        others = [f"{sum(cell.status == kind for cell in self.cells)} {kind}" for kind in kinds]
        return f"{done} of {self.count} runs finished{', ' if others else ''}{', '.join(others)}."

    @property
    def lines(self) -> list[dict[str, Any]]:
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
        return [Figure(p.name, p.caption, _labelled(p.inline(), p.alt)) for p in self.pictures]

    @property
    def problems(self) -> list[dict[str, str]]:
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
        configs = [cell.config for cell in self.cells if cell.config]
        first = configs[0] if configs else {}
        return [
            (key, _value(value))
            for key, value in first.items()
            if key not in OF_THE_RUN and all(key in config and config[key] == value for config in configs)
        ]

    @property
    def differing(self) -> Differing:
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
        """Of the runs that tell, each value once."""
        found: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for key, value in cell.environment.items():
                found.setdefault(key, {})[_value(value)] = None
        return [(key, " or ".join(value for value in values if value) or "–") for key, values in found.items()]

    @property
    def commands(self) -> list[str]:
        return [command.format(folder=_quoted(self.folder)) for command in COMMANDS]


class Compared(NamedTuple):
    """A comparison and what the seeds say of it, as shown; ``paper``: the paper's own difference."""

    comparison: str
    difference: str
    paper: str
    detectable: str
    seeds: str
    p: str
    state: str


@dataclass(frozen=True)
class Answered:
    """A question about the cause, its answer, and the comparisons that it rests on."""

    asks: str
    says: str
    compared: tuple[Compared, ...]


@dataclass(frozen=True)
class Statement:
    """What stands above a claim's report. ``words``: titles and texts. ``commands``: what makes its runs, and the page."""

    claim: str
    paper: str
    verdict: str
    words: tuple[tuple[str, str], ...]
    compared: tuple[Compared, ...]
    commands: tuple[str, ...]
    whys: tuple[Answered, ...] = ()


@dataclass(frozen=True)
class Listed:
    """One experiment of an index page; without a ``report`` the ``error`` says why. ``link``: to its own page, relative."""

    id: str
    title: str
    report: Report | None = None
    link: str = ""
    error: str = ""
    program: Program | None = None


def report_page(report: Report) -> str:
    return _page(report, None, [])


def claim_page(report: Report, statement: Statement) -> str:
    """The report of a claim's runs, under the claim and its verdict."""
    return _page(report, statement, [("verdict", "Verdict"), *([("why", "Why")] if statement.whys else [])])


def _page(report: Report, statement: Statement | None, contents: list[tuple[str, str]]) -> str:
    contents = [*contents, ("results", "Results")]
    contents += [("figures", "Figures")] if report.pictures else []
    contents += [("problems", "Runs that are not in the numbers")] if report.problems else []
    contents += [("settings", "Settings"), ("again", "To do it again")]
    return _render("report.html", {"title": report.settings.title, "report": report, "statement": statement, "contents": contents})


def index_page(title: str, reports: Sequence[Listed]) -> str:
    return _render("index.html", {"title": title, "reports": reports})


def program_page(program: Program) -> str:
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
