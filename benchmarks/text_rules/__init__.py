"""The yardstick of text training: see `report.py`."""

from benchmarks.text_rules.report import run

__all__ = ["run"]
