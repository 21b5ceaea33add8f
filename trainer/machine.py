"""The machine that this process sees, for a run that plans for itself: GPUs, cores, memory, disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from core.hardware import CPU, GpuSet, Hardware, from_nvml

_CGROUP_MEMORY = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def machine(disk: Path) -> Hardware:
    """What may be used, by the container's limits; `disk` is where checkpoints will lie."""
    return Hardware(
        gpus=gpus(),
        cpu_cores=cores(),
        memory_bytes=memory(),
        disk_free_bytes=shutil.disk_usage(disk).free,
    )


def gpus() -> GpuSet:
    """By CUDA, which sees what the engine will see. Cards of several kinds: those of the most memory."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return GpuSet(kind=CPU, count=1)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [from_nvml(one.name, int(one.total_memory), (int(one.major), int(one.minor))) for one in found]
    best = max(kinds, key=lambda kind: kind.memory_bytes)
    alike = [kind for kind in kinds if kind.name == best.name]
    return GpuSet(kind=min(alike, key=lambda kind: kind.memory_bytes), count=len(alike))


def cores() -> int:
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


def memory() -> int:
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
