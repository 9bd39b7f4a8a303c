"""Report of an evaluation: tables, figures and an HTML page."""

from selfadapt.report.page import write_report

__all__ = ["write_report"]
