"""Find out whose a run is: the data directory's id, which its runs carry in every engine.

Every process of a run has a mark with that id in its environment. The wrapper ends all that it started;
the mark finds what is left when the wrapper itself was killed, or when Docker died while it started a
container.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from core.domain.errors import GodMinerError
from core.system.wrapper import kill_until_gone

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


#: The variable that every process of a run inherits.
MARK_VARIABLE = "GOD_MINER_RUN"
GONE_S = 5.0


def run_mark(data_id: str, key: str) -> str:
    """The variable's value, which no other run has."""
    return f"{data_id}/{key}"


def marked_processes(value: str) -> set[int]:
    wanted = f"{MARK_VARIABLE}={value}".encode()
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.add(int(entry.name))
    return pids


def kill_marked(value: str) -> int:
    """Kill every process with this mark, until none is left; return how many there were at first."""
    return kill_until_gone(lambda: marked_processes(value), GONE_S)
