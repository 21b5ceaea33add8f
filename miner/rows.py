"""Rows of a dataset file, as validators send them (one JSON array) or as people keep them (JSON lines)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.errors import ConfigError, Problem

#: Rows looked at for lengths; evenly spread over the file.
SAMPLE = 2000
#: The largest file that validators make.
LARGEST = 2_147_483_646


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """A sample of the rows and how many there are. `ConfigError` for what is no such file."""
    if path.stat().st_size > LARGEST:
        raise _wrong(path, f"{path.stat().st_size:,} bytes", f"a dataset has at most {LARGEST:,}")
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = _array(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    found = [row for row in rows if isinstance(row, dict)]
    if len(found) < len(rows):
        raise _wrong(path, f"{len(rows) - len(found)} rows", "every row is a JSON object")
    step = max(len(found) // SAMPLE, 1)
    return found[::step][:SAMPLE], len(found)


def read_json_object(path: Path) -> dict[str, Any]:
    """A config.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(path, "", f"cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise _wrong(path, type(found).__name__, "a JSON object is needed")
    return found


def _array(text: str, path: Path) -> list[Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, "", f"is no JSON array: {error}") from None
    return list(found)


def _lines(text: str, path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise _wrong(path, f"line {number}", f"is no JSON: {error}") from None
    return rows


def _wrong(path: Path, value: str, rule: str) -> ConfigError:
    return ConfigError(str(path), [Problem(path.name, value, rule)])
