"""Logs of jobs that are over, cut to their two ends: what began them and what ended them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: A training may write two hundred megabytes; what anybody asks for a week later is in so much of it.
MOST = 1 << 20
_HEAD_SHARE = 4


def shorten(path: Path, *, mark: bool, most: int = MOST) -> int:
    """Whole lines of the beginning and, three times as much, of the end. With `mark` a line between says
    what is missing. Bytes freed. A training could write to the folder: a link is not followed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    with os.fdopen(file, "rb") as whole:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size <= most:
            return 0
        head = whole.read(most // _HEAD_SHARE)
        whole.seek(found.st_size - (most - len(head)))
        tail = whole.read()
    head = head[: head.rfind(b"\n") + 1]
    tail = tail[tail.find(b"\n") + 1 :]
    gone = found.st_size - len(head) - len(tail)
    between = f"[{gone:,} bytes were removed here]\n".encode() if mark else b""
    partial = path.with_name(f".{path.name}.short")
    partial.unlink(missing_ok=True)
    partial.write_bytes(head + between + tail)
    os.replace(partial, path)
    return gone - len(between)
