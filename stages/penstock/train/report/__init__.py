"""report.html: one training run on one page that opens anywhere, offline and years later."""

from penstock.train.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
