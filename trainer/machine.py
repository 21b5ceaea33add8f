"""The machine that this process sees, for a run that plans for itself: GPUs, cores, memory, disk."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from core.hardware import CPU, GpuKind, GpuSet, Hardware, from_nvml

log = logging.getLogger(__name__)

DEVICES = Path("/dev")
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
    """By CUDA where torch is there, which sees what the engine will see; else by the driver's library.
    Cards of several kinds: those of the most memory."""
    found = _by_torch() if importlib.util.find_spec("torch") else _by_driver()
    if not found:
        return GpuSet(kind=CPU, count=1)
    best = max(found, key=lambda kind: kind.memory_bytes)
    alike = [kind for kind in found if kind.name == best.name]
    return GpuSet(kind=min(alike, key=lambda kind: kind.memory_bytes), count=len(alike))


def unusable_gpus() -> list[str]:
    """Cards that were given to this container, asked for where none can be used: mostly a driver that is too
    old for the image. On a processor no task is done in its time; told at once, somebody can help."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return []
    return sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))


def _by_torch() -> list[GpuKind]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [from_nvml(one.name, int(one.total_memory), (int(one.major), int(one.minor))) for one in found]


def _by_driver() -> list[GpuKind]:
    """Without an image engine's own torch, which lives in another interpreter."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no library, no driver, no permission: no GPU
        log.info("no GPU: %s", error)
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [_kind_of(pynvml, one) for one in _visible(handles)]
    finally:
        pynvml.nvmlShutdown()


def _kind_of(pynvml: Any, handle: Any) -> GpuKind:
    name = pynvml.nvmlDeviceGetName(handle)
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return from_nvml(name if isinstance(name, str) else name.decode(), total, (int(major), int(minor)))


def _visible(handles: list[Any]) -> list[Any]:
    """Of the container's cards those that CUDA is allowed to use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return handles
    chosen = [int(one) for one in named.split(",") if one.strip().isdigit()]
    return [handles[at] for at in chosen if at < len(handles)]


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
