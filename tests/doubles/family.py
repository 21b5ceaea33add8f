"""The processes of this test process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children() -> set[int]:
    """All of them, whoever started them: backends and daemons that live as long as the tests are among them,
    so look before and after."""
    found: set[int] = set()
    for listed in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, listed.read_text().split()))
    return found
