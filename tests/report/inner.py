"""The inner modules which the tests of reports are about, imported in one place: a module that moves is renamed here."""

# ruff: noqa: F401

from __future__ import annotations

from fl_bn.report import FORMATS, write_index, write_program_report, write_report
from fl_bn.report.cells import Cell, read_cells
from fl_bn.report.curves import Series, series
from fl_bn.report.formats import latex, runs_csv, to_csv, to_latex, to_markdown
from fl_bn.report.layout import Layout, Table, lay_out, tabulate
from fl_bn.report.line_pictures import curves
from fl_bn.report.pictures import Picture
from fl_bn.report.program import read_program
from fl_bn.report.settings import Heat, read_settings
from fl_bn.report.write import read
from fl_bn.run.config import ConfigError
