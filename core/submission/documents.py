"""Small JSON files of a submission, read from hostile bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.submission.faults import Fault, FaultKind, shown
from core.submission.folder import read_plain

#: Configurations and cards have kilobytes; an index of a mixture of experts with many shards has megabytes.
MAX_DOCUMENT = 32_000_000

Item = Path | bytes


def read_item(item: Item, limit: int = MAX_DOCUMENT) -> bytes:
    return read_plain(item, limit) if isinstance(item, Path) else item


def json_object(name: str, item: Item) -> dict[str, Any] | Fault:
    """The object in a JSON file, or what is wrong with it."""
    try:
        found = json.loads(read_item(item))
    except OSError as error:
        return Fault(FaultKind.UNREADABLE, name, "", f"can't be read: {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        return Fault(FaultKind.BAD_JSON, name, "", f"is no JSON: {shown(str(error), 100)}; save it again")
    if not isinstance(found, dict):
        return Fault(FaultKind.BAD_JSON, name, type(found).__name__, "a JSON object is needed; save it again")
    return found


def to_json(value: dict[str, Any]) -> bytes:
    """As transformers and peft write them. Half a letter, which JSON can say and UTF-8 can not, stays what it
    was there: an escape."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
    return text.encode(errors="backslashreplace") + b"\n"
