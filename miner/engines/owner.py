"""Whose a run is: the data folder's own name, which its runs carry in every engine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from core.errors import GodMinerError

FILE_NAME = "data-id"
_SHAPE = re.compile(r"[0-9a-f]{16}")


class DataIdUnusable(GodMinerError):
    """The data folder's name can be neither read nor made."""

    code = "data_id_unusable"


def data_id(data_dir: Path) -> str:
    """Made at the first call and kept. Not the folder's path: two machines, or two lives of one path, have
    the same, and whoever clears away orphans must never take another's."""
    path = data_dir / FILE_NAME
    try:
        if not path.exists():
            _make(path)
        found = path.read_text().strip()
    except OSError as error:
        raise DataIdUnusable(
            f"{path} can not be used ({error.strerror}); make DATA_DIR={data_dir} writable"
        ) from None
    if not _SHAPE.fullmatch(found):
        raise DataIdUnusable(
            f"{path} holds {found[:40]!r} and not 16 hexadecimal digits; restore it from a backup, or delete "
            "it when nothing of this folder is running"
        )
    return found


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
    part.write_text(secrets.token_hex(8) + "\n")
    # A link fails where somebody was faster, and then theirs counts.
    with contextlib.suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
