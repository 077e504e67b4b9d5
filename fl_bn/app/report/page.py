"""Make the report of a sweep or of several runs: its table, curves, CSV and page."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fl_bn.app.pictures import Picture
from fl_bn.app.report.cells import Cell, Planned, read_cells, read_runs
from fl_bn.app.report.formats import runs_csv, texts, to_markdown
from fl_bn.app.report.layout import Layout, Table, by_domain, lay_out, tabulate
from fl_bn.app.report.pictures import against, curves
from fl_bn.app.report.settings import AVERAGE, EACH, SEED, Settings, read_settings
from fl_bn.support import durable

PAGE = "report.html"
OF_THE_RUN = (SEED, "name", "output", "resume", "pictures")  # run-config keys in which all runs differ, so they are not listed
Further = Callable[[Layout, Path], Sequence[Picture]]


@dataclass(frozen=True)
class Report:
    """Hold the report of some runs, as the template of the page shows it."""

    layout: Layout
    table: Table
    cells: tuple[Cell, ...]
    pictures: tuple[Picture, ...]
    folder: str

    @property
    def state(self) -> str:
        """Return a sentence on how many runs are finished, failed and so on."""
        states = Counter(cell.status for cell in self.cells)
        return f"{len(self.cells)} runs: {', '.join(f'{count} {status}' for status, count in states.items())}."

    @property
    def figures(self) -> list[tuple[str, str, str]]:
        """Return the name, the caption and the base64 of each picture."""
        return [(picture.name, picture.caption, base64.b64encode(picture.png).decode()) for picture in self.pictures]

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Return the run-config keys and their values, first those in which runs differ."""
        values: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for key, value in cell.config.items():
                if key not in OF_THE_RUN:
                    values.setdefault(key, {})[value if isinstance(value, str) else json.dumps(value)] = None
        several = sorted(values.items(), key=lambda entry: len(entry[1]) == 1)
        return [(key, " or ".join(text or "''" for text in of)) for key, of in several]


def report_of(settings: Settings, cells: Sequence[Cell], folder: Path, further: Further | None = None) -> Report:
    """Make the report of some runs, which ``folder`` holds.

    ``further`` makes pictures beyond the curves, from layout and folder.
    ``ConfigError``: the settings name an axis that no run has, or no numeric one.
    """
    placed = by_domain(cells, settings.domains == EACH) if settings.domains else cells
    layout = lay_out(settings, placed)
    pictures = [picture for x in settings.x if (picture := curves(layout, x))]
    pictures += [against(layout, axis) for axis in settings.against]
    pictures += further(layout, folder) if further else []
    return Report(layout, tabulate(layout, placed), tuple(cells), tuple(pictures), folder.resolve().name)


def write_report(folder: Path, runs: Sequence[Path] = (), further: Further | None = None, planned: Planned | None = None) -> list[Path]:
    """Write the report of a sweep into its folder: ``runs.csv``, ``table.md``, curves, ``report.html``.

    Args:
        folder: The folder of the sweep.
        runs: Folders of runs that are no sweep; ``folder`` is then that of the
            report alone.
        further: Makes pictures beyond the curves, from the layout of the runs and
            the folder.
        planned: The runs that the sweep plans; None: those that have ended.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: ``folder`` is not the folder of a sweep, none of its runs has
            ended, or [report] in its ``sweep.toml`` is wrong.
    """
    if runs:
        report = report_of(Settings(folder.name, domains=AVERAGE), read_runs(runs), folder, further)
    else:
        report = report_of(read_settings(folder), read_cells(folder, planned), folder, further)
    files = {"runs.csv": runs_csv(report.cells).encode()}
    files["table.md"] = to_markdown(report.table).encode()
    files |= {f"{picture.name}.png": picture.png for picture in report.pictures}
    files[PAGE] = report_page(report).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        durable.write(folder / name, content, mode=0o666)
    return [folder / name for name in files]


def report_page(report: Report) -> str:
    """Return the page of a report, whose template shows labels, errors and notes as text."""
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("fl_bn.app.report"), **options)
    return environment.get_template("report.html").render(report=report, lines=texts(report.table))
