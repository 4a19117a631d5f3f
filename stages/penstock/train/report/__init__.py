"""report.html: a self-contained page of one training run that works offline."""

from penstock.train.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
