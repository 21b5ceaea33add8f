"""Rows of a dataset file, as validators send them (one JSON array) or as people keep them (JSON lines)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from core.errors import ConfigError, Problem
from core.json_rows import BadRows, JsonRows

#: Rows looked at for lengths; evenly spread over the file.
SAMPLE = 2000


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """A sample of the rows and how many there are. `ConfigError` for what is no such file."""
    sample: list[dict[str, Any]] = []
    picker, count = random.Random(0), 0  # noqa: S311 - a sample, no secret
    try:
        with path.open("rb") as file:
            rows = JsonRows(file)
            for count, row in enumerate(rows, 1):
                if len(sample) < SAMPLE:
                    sample.append(row)
                elif (place := int(picker.random() * count)) < SAMPLE:
                    sample[place] = row
    except BadRows as error:
        raise _wrong(path, "", f"is no dataset: {error}") from None
    if rows.odd:
        raise _wrong(path, f"{rows.odd} rows", f"every row is a JSON object, {rows.first_odd}")
    return sample, count


def read_json_object(path: Path) -> dict[str, Any]:
    """A config.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, "", f"cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise _wrong(path, type(found).__name__, "a JSON object is needed")
    return found


def _wrong(path: Path, value: str, rule: str) -> ConfigError:
    return ConfigError(str(path), [Problem(path.name, value, rule)])
