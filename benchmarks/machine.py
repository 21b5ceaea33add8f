"""Facts about this machine, and about a process's memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

_LIBRARIES = ("uvicorn", "uvloop", "httptools", "fastapi", "pydantic")


def facts() -> dict[str, str]:
    """The machine, as far as it explains a number."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return {
        "CPU": f"{len(os.sched_getaffinity(0))} × {_cpu_model()}",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "libraries": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def rss_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    return sum(_rss_kb(one) for one in _family(pid)) / 1024


def cpu_s(pid: int) -> float:
    """Processor time that a process and its children have used."""
    ticks = 0
    for one in _family(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def size_kb(folder: Path, pattern: str = "**/*") -> float:
    """Size of a folder's files on disk."""
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file()) / 1024


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _rss_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
