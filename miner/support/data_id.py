"""The id of a data directory, which its runs carry in every backend."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from core.domain.errors import GodMinerError

DATA_ID_FILE = "data-id"
_DATA_ID_SHAPE = re.compile(r"[0-9a-f]{16}")


class DataIdUnusable(GodMinerError):
    """The id of the data directory can be neither read nor written."""

    code = "data_id_unusable"


def data_id(data_dir: Path) -> str:
    """The directory's own id, made at the first call. Its path would not do: on two machines, or after a new
    installation, it is the same, and whoever removes orphans must never take another's."""
    path = data_dir / DATA_ID_FILE
    try:
        if not path.exists():
            _make_data_id(path)
        text = path.read_text().strip()
    except OSError as error:
        raise DataIdUnusable(
            f"{path} cannot be used ({error.strerror}); make DATA_DIR={data_dir} writable"
        ) from None
    if not _DATA_ID_SHAPE.fullmatch(text):
        raise DataIdUnusable(
            f"{path} holds {text[:40]!r} and not 16 hexadecimal digits; restore it from a backup, or delete "
            "it when nothing of this folder is running"
        )
    return text


def _make_data_id(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{DATA_ID_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
    part.write_text(secrets.token_hex(8) + "\n")
    # A link fails where another process was faster; then its id counts.
    with contextlib.suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
