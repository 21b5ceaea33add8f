"""The files that an image engine leaves on its way, and which of them is the newest that is whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from core.submission.safetensors import BadHeader, read_header

LAST = "last.safetensors"
_NUMBERED = re.compile(r"last[-_](\d+)\.safetensors")


def newest_whole(output: Path) -> Path | None:
    """sd-scripts: `last-000010.safetensors` by epoch; ai-toolkit: `last/last_000000250.safetensors` by step;
    both in the end `last.safetensors`. What is being written is shorter than its header says."""
    found = sorted(output.rglob("last*.safetensors"), key=_order, reverse=True)
    return next((path for path in found if is_whole(path)), None)


def _order(path: Path) -> tuple[bool, int]:
    numbered = _NUMBERED.fullmatch(path.name)
    return path.name == LAST, int(numbered[1]) if numbered else -1


def is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(read_header(file).tensors)
    except (OSError, BadHeader):
        return False


def placing(source: Path, name: str) -> Callable[[Path], None]:
    """Writes the file into a submission folder under this name. A link costs nothing: engines write their
    files anew and never change one."""

    def write(folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    return write
