"""Measure the host: processor, memory, disk."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from miner.api.fleet import HostSample

_STAT = Path("/proc/stat")
_MEMINFO = Path("/proc/meminfo")


class HostMeter:
    """Measures the host. The use of its processor is counted since the last sample."""

    def __init__(self, data_dir: Path, *, stat: Path = _STAT, meminfo: Path = _MEMINFO) -> None:
        self._data_dir, self._stat, self._meminfo = data_dir, stat, meminfo
        self._ticks: tuple[int, int] | None = None

    def sample(self, at: float) -> HostSample:
        free = share = None
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._data_dir)
            free, share = usage.free, usage.free / usage.total if usage.total else None
        return HostSample(at, self._cpu(), self._memory(), free, share)

    def _cpu(self) -> float | None:
        """The share of all cores that was busy, or None at the first call."""
        before, self._ticks = self._ticks, self._read_ticks()
        if before is None or self._ticks is None or self._ticks[1] <= before[1]:
            return None
        idle, total = self._ticks[0] - before[0], self._ticks[1] - before[1]
        return min(max(1 - idle / total, 0.0), 1.0)

    def _read_ticks(self) -> tuple[int, int] | None:
        """Ticks that the cores were idle or waited for disks, and ticks in all."""
        try:
            with self._stat.open("rb") as file:
                name, *ticks = file.readline().split()
            # user nice system idle iowait irq softirq steal; guests are counted in user and nice
            counted = [int(value) for value in ticks[:8]]
        except (OSError, ValueError):
            return None
        return (counted[3] + counted[4], sum(counted)) if name == b"cpu" and len(counted) == 8 else None

    def _memory(self) -> float | None:
        """The share of the memory that is not available to programs."""
        try:
            text = self._meminfo.read_text(encoding="ascii")
        except (OSError, ValueError):
            return None
        sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text, re.MULTILINE))
        if len(sizes) < 2 or not int(sizes["MemTotal"]):
            return None
        return 1 - int(sizes["MemAvailable"]) / int(sizes["MemTotal"])
