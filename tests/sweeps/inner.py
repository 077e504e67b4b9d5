"""The inner modules which the tests of sweeps and experiments are about, imported in one place: a module that moves is renamed here."""

# ruff: noqa: F401

from __future__ import annotations

from fl_bn.cli.main import app
from fl_bn.cli.sweep import carry_out
from fl_bn.data.dataset import DataNotFound
from fl_bn.flower.compat import LOGGER
from fl_bn.report.cells import Cell as ReportedCell
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.sweep import cells, run
from fl_bn.sweep.cells import Cell, run_cell
from fl_bn.sweep.file import Sweep, parse, read
from fl_bn.sweep.run import check
