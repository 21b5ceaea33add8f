"""Is this weight file whole? Read from the safetensors header, without loading anything."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

#: The format's own bound on its header.
MOST_HEADER = 100 * 2**20


def header(path: Path) -> dict[str, Any] | None:
    """The header of a safetensors file that is as long as it says; None for any other file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MOST_HEADER):
                return None
            found: Any = json.loads(file.read(length))
    except (OSError, struct.error, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    ends = [entry["data_offsets"][1] for name, entry in found.items() if name != "__metadata__"]
    return found if 8 + length + max(ends, default=0) == size else None


def is_whole(path: Path) -> bool:
    """A complete file with at least one tensor."""
    found = header(path)
    return found is not None and any(name != "__metadata__" for name in found)
