"""Report the results of a sweep: tables, pictures and one self-contained page, from the files of its runs."""

from fl_bn.report.write import FORMATS, write_index, write_program_report, write_report

__all__ = ["FORMATS", "write_index", "write_program_report", "write_report"]
