"""Write the files of a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fl_bn.report import line_pictures, map_pictures, program
from fl_bn.report.cells import Cell, read_cells, read_runs
from fl_bn.report.curves import series
from fl_bn.report.domains import by_domain
from fl_bn.report.formats import runs_csv, to_csv, to_latex, to_markdown
from fl_bn.report.layout import Layout, lay_out, tabulate
from fl_bn.report.page import Listed, Report, index_page, program_page, report_page
from fl_bn.report.pictures import Picture
from fl_bn.report.settings import EACH, Settings, read_settings
from fl_bn.run.config import ConfigError
from fl_bn.support import durable
from fl_bn.support.names import expected

FORMATS: Final = ("csv", "md", "tex", "png", "html")
ALL: Final = (*FORMATS, "svg", "pdf")
PAGE = "report.html"


def write_report(folder: Path, formats: Sequence[str] = FORMATS, runs: Sequence[Path] = ()) -> list[Path]:
    """Write the report of a sweep, ``report.html``, its table and pictures, and ``runs.csv``, into the folder of the sweep.

    Args:
        folder: The folder of the sweep.
        formats: The formats to write: csv, md and tex for tables, png, svg and pdf for pictures, and html for the page.
            There are no pictures of quantities that no run measured.
        runs: Folders of runs that are no sweep; ``folder`` is then the folder of the report. Empty: the runs of the sweep.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: ``folder`` is not the folder of a sweep, or none of its runs has ended. Or [report] has an unknown key
            or a wrong value, or a format is unknown.
    """
    if unknown := [name for name in formats if name not in ALL]:
        raise ConfigError(expected("formats", unknown[0], ALL))
    report = report_of(Settings(folder.name), read_runs(runs), folder.resolve().name) if runs else read(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = report.table
    texts: list[tuple[str, str, Callable[[], str]]] = [
        ("csv", "table.csv", lambda: to_csv(table)),
        ("csv", "runs.csv", lambda: runs_csv(report.cells)),
        ("md", "table.md", lambda: to_markdown(table)),
        ("tex", "table.tex", lambda: to_latex(table)),
        ("html", PAGE, lambda: report_page(report)),
    ]
    made = [_write(folder / name, make()) for kind, name, make in texts if kind in formats]
    kinds = [kind for kind in ("png", "svg", "pdf") if kind in formats]
    return made + [path for picture in report.pictures for path in picture.save(folder, kinds)]


def write_index(folders: Sequence[Path], path: Path, title: str = "Experiments") -> Path:
    """Write one page with the reports of several experiments, and links to the pages of the experiments.

    An experiment without a report is listed with the reason.

    Args:
        folders: The folders of the experiments.
        path: The file of the page.
        title: The heading of the page.

    Returns:
        ``path``.
    """
    listed = []
    for number, folder in enumerate(folders, 1):
        id = f"experiment-{number}"
        page = folder / PAGE
        link = Path(os.path.relpath(page.resolve(), path.parent.resolve())).as_posix() if page.exists() else ""
        try:
            if (folder / program.FILE).exists():
                shown = program.read_program(folder, f"{id}-")
                listed.append(Listed(id, f"{folder.name}: {shown.title}", link=link, program=shown))
                continue
            report = read(folder, f"{id}-")
        except ConfigError as error:
            listed.append(Listed(id, folder.name, error=str(error)))
            continue
        listed.append(Listed(id, f"{folder.name}: {report.settings.title}", report, link))
    path.parent.mkdir(parents=True, exist_ok=True)
    return _write(path, index_page(title, listed))


def write_program_report(folder: Path, source: Path) -> Path:
    """Write ``report.html`` for an experiment that is a program, and not a sweep.

    Args:
        folder: The folder with the results of the program.
        source: The file of the experiment, which is copied into the folder.

    Returns:
        The path of the page.
    """
    _write(folder / program.FILE, source.read_text(encoding="utf-8"))
    return _write(folder / PAGE, program_page(program.read_program(folder)))


def read(folder: Path, id: str = "") -> Report:
    """Make the report of a sweep from the files in its folder.

    Args:
        folder: The folder of the sweep.
        id: A prefix that makes the ids of the report unique on a page.

    Raises:
        ConfigError: ``folder`` is not the folder of a sweep, or its settings are wrong, as ``write_report`` says.
    """
    return report_of(read_settings(folder), read_cells(folder), folder.resolve().name, id)


def report_of(settings: Settings, cells: Sequence[Cell], folder: str, id: str = "") -> Report:
    """Make the report of some runs, which may be in several folders.

    Args:
        settings: The settings of the report.
        cells: The runs.
        folder: The name of the folder that the report shows.
        id: A prefix that makes the ids of the report unique on a page.

    Raises:
        ConfigError: The settings name an axis or a row that no run has.
    """
    placed = by_domain(cells, settings.domains == EACH) if settings.domains else cells
    layout = lay_out(settings, placed)
    return Report(layout, tabulate(layout, placed), tuple(cells), tuple(_pictures(layout)), folder, id)


def _pictures(layout: Layout) -> list[Picture]:
    settings = layout.settings
    available = series(layout, layout.metric)
    made: list[Picture | None] = [line_pictures.curves(layout, available, x) for x in settings.x]
    made += [line_pictures.against(layout, axis) for axis in settings.against]
    made += [map_pictures.heat(layout, settings.heat)] if settings.heat else []
    made += [map_pictures.boxplot(layout)] if settings.boxplot else []
    made += [map_pictures.per_class(layout)] if settings.per_class else []
    made += [line_pictures.drift(layout), *line_pictures.diagnostics(layout)] if settings.drift else []
    return [picture for picture in made if picture is not None]


def _write(path: Path, text: str) -> Path:
    durable.write(path, text.encode(), mode=0o666)
    return path
