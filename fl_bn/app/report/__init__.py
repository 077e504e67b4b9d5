"""Report the results of a sweep, or of several runs: a table, curves, a CSV and a page."""

from fl_bn.app.report.page import write_report

__all__ = ["write_report"]
