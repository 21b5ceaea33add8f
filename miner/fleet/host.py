"""What surrounds the cards: cores, memory, room on the disk."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

#: A container's limit on its memory, newer and older kernels.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Logs and databases write all the time: smaller changes are none.
_DISK_STEP = 10**9
_MEMINFO = Path("/proc/meminfo")


def host_facts(data_dir: Path) -> dict[str, Any]:
    """For `Hardware`; what can't be found out is left to its defaults."""
    found: dict[str, Any] = {"cpu_cores": len(os.sched_getaffinity(0))}
    memory = memory_bytes()
    if memory:
        found["memory_bytes"] = memory
    with contextlib.suppress(OSError):
        found["disk_free_bytes"] = shutil.disk_usage(data_dir).free // _DISK_STEP * _DISK_STEP
    return found


def memory_bytes(meminfo: Path = _MEMINFO, limits: tuple[Path, ...] = _LIMITS) -> int | None:
    """What this process and its children may use at most."""
    try:
        match = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        match = None
    total = int(match[1]) * 1024 if match else None
    for file in limits:
        try:
            limit = int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # "max", or not such a kernel
            continue
        total = min(total or limit, limit)
    return total
