"""Rows out of a CSV file, one at a time. The first line names the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from core.json_rows import MAX_ROW, BadRows


class CsvRows:
    """Iterate over it once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        csv.field_size_limit(MAX_ROW)
        text = io.TextIOWrapper(self._file, encoding="utf-8-sig", errors="replace", newline="")
        try:
            for row in csv.DictReader(text):
                self.count += 1
                row.pop(None, None)  # cells beyond the named columns
                yield row
        except csv.Error as error:
            raise BadRows(f"row {self.count + 1:,} can not be read as CSV: {error}") from None
        finally:
            text.detach()
