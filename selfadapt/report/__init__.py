"""Reports: tables, figures and a page from the rows of an evaluation."""

from selfadapt.report.page import write_report

__all__ = ["write_report"]
