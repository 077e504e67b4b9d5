"""The inner modules which the tests of reports are about, imported in one place: a module that moves is renamed here."""

# ruff: noqa: F401

from __future__ import annotations

from pathlib import Path

from fl_bn.report import write_report
from fl_bn.report.cells import Cell, read_cells
from fl_bn.report.formats import runs_csv, to_markdown
from fl_bn.report.layout import Table, lay_out, tabulate
from fl_bn.report.page import Report, report_of
from fl_bn.report.pictures import Picture, curves, series
from fl_bn.report.settings import read_settings
from fl_bn.run.config import ConfigError


def read(folder: Path) -> Report:
    """Make the report of a sweep from the files in its folder."""
    return report_of(read_settings(folder), read_cells(folder), folder)
