"""Cores and memory of this machine, or of the container that limits it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_CGROUP_MEMORY = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
#: Beside each limit: what is taken, and the name of what of it is a cache of files that gives way.
_CGROUP_TAKEN = (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file"))
_MEMINFO = Path("/proc/meminfo")
_MOUNTS = Path("/proc/self/mountinfo")
#: File systems whose files lie in memory.
_IN_MEMORY = ("tmpfs", "ramfs")


def usable_cores() -> int:
    """The affinity mask and the quota, whichever is less: `os.cpu_count` knows neither."""
    allowed = len(os.sched_getaffinity(0))
    quota = _quota()
    return max(min(allowed, int(quota)) if quota else allowed, 1)


def _quota() -> float | None:
    try:
        quota, period = _CGROUP_CPU.read_text("ascii").split()[:2]
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us, period_us = (float(path.read_text("ascii")) for path in _CGROUP_QUOTA)
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None


def usable_memory() -> int:
    """The machine's, or the container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_MEMORY:
        try:
            text = path.read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:
            total = min(total, int(text))
    return total


def free_memory() -> int:
    """Bytes of `usable_memory` that are not taken."""
    free = _number_of(_MEMINFO, "MemAvailable:") * 1024
    limit = usable_memory()
    for path, (taken, cache) in zip(_CGROUP_MEMORY, _CGROUP_TAKEN, strict=True):
        try:
            used = int(path.with_name(taken).read_text("ascii"))
        except (OSError, ValueError):
            continue
        free = min(free, limit - used + _number_of(path.with_name("memory.stat"), cache))
    return max(free, 0)


def _number_of(path: Path, name: str) -> int:
    """The number behind this word, in a file of one such pair on each line; 0 without one."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)


def is_in_memory(folder: Path) -> bool:
    """Return True if files in this folder take memory instead of disk."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text("utf-8", "replace").splitlines()]
    except OSError:
        return False
    return any(words[2] == number and words[words.index("-") + 1] in _IN_MEMORY for words in mounts)
