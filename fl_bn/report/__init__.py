"""Report the results of a sweep, or of several runs, as one table, curves, one tidy CSV and one page."""

from fl_bn.report.page import write_report

__all__ = ["write_report"]
