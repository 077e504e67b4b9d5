"""Report the results of a sweep from the files of its runs, as tables, pictures and one page that loads nothing else."""

from fl_bn.report.write import FORMATS, write_index, write_program_report, write_report

__all__ = ["FORMATS", "write_index", "write_program_report", "write_report"]
