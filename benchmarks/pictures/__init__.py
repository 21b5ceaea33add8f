"""The yardstick of picture training: see `report.py`."""

from benchmarks.pictures.report import run

__all__ = ["run"]
