"""Describe what a scan of the host finds: GPUs that answer or that a setting names, cores, memory, disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from core.domain.cores import cores_in
from core.domain.errors import GodMinerError
from core.domain.hardware import GpuKind, GpuLink, GpuSet
from core.domain.keys import CPU_ID

#: How long the scan of this machine waits for that of a cluster.
CLUSTER_WAIT_S = 1.0


class ScanFailed(GodMinerError):
    """The GPUs could not be scanned this time. Nothing is known, nothing changes."""

    code = "inventory_unreadable"


class NoNvidiaDriver(ScanFailed):
    """There is no NVIDIA driver on this host at all."""

    code = "no_driver"


@dataclass(frozen=True, slots=True)
class ScannedGpu:
    """A GPU that answered."""

    id: str
    index: int
    kind: GpuKind
    linked: frozenset[str] = frozenset()
    total_bytes: int = 0
    #: None: unknown.
    used_bytes: int | None = None
    #: Processes that compute on it.
    processes: int = 0
    #: The operator's or the scheduler's reason for excluding it, if it is excluded.
    excluded: str | None = None
    #: Its machine, its use by others, and the cores near it: as in `Gpu`.
    node: str = ""
    busy: tuple[tuple[float, float], ...] = ()
    cores: str = ""


@dataclass(frozen=True, slots=True)
class ScannedNode:
    """A machine of a cluster."""

    name: str
    #: The backend that runs trainings there.
    backend: str
    #: Fields of `Hardware`, without `gpus`.
    facts: Mapping[str, Any]
    state: str = ""


@dataclass(frozen=True, slots=True)
class GpuScan:
    gpus: tuple[ScannedGpu, ...]
    #: Index → what is wrong with a GPU that is there but does not give its id.
    errors: Mapping[int, str] = field(default_factory=dict)
    #: "driver 550.127.05", "GPUS=4xH100", or a cluster with its version.
    source: str = ""
    #: Machines of a cluster; empty: all GPUs are in this one.
    nodes: tuple[ScannedNode, ...] = ()
    #: What is left out, and why: a node whose GPUs are of an unknown kind.
    notes: tuple[str, ...] = ()
    #: The reason why a part of it is from an earlier scan, or None if all of it is new.
    problem: str | None = None


class GpuSource(Protocol):
    """Finds the GPUs: by a driver, a setting, or a cluster's backend."""

    async def scan(self) -> GpuScan:
        """May take seconds, and ends in a bounded time. `ScanFailed`: nothing was found out."""

    async def close(self) -> None: ...


class JoinedGpuSource:
    """This machine's GPUs and a cluster's.

    While the cluster cannot be asked, its last scan stays, and its nodes take no new jobs. Before its first
    scan nothing is known: what runs there after a restart must not count as lost.
    """

    def __init__(self, local: GpuSource, cluster: GpuSource) -> None:
        self._local, self._cluster = local, cluster
        self._asking: asyncio.Task[GpuScan] | None = None
        self._last: GpuScan | None = None
        self._problem: str | None = None

    async def scan(self) -> GpuScan:
        if self._asking is None:
            self._asking = asyncio.create_task(self._cluster.scan(), name="cluster scan")
        local, cluster = await self._local.scan(), await self._cluster_scan(self._asking)
        gpus, problem = cluster.gpus, self._problem
        if problem is not None:
            gpus = tuple(replace(gpu, excluded=gpu.excluded or problem) for gpu in gpus)
        return GpuScan(
            (*local.gpus, *gpus),
            local.errors,
            f"{local.source}; {problem or cluster.source}",
            (*local.nodes, *cluster.nodes),
            (*local.notes, *cluster.notes),
            problem,
        )

    async def _cluster_scan(self, asked: asyncio.Task[GpuScan]) -> GpuScan:
        """The last one where this takes long: the commands of a controller that is away wait for 20 seconds,
        and this machine must not."""
        await asyncio.wait({asked}, timeout=None if self._last is None else CLUSTER_WAIT_S)
        if asked.done():
            self._asking = None
            try:
                self._last, self._problem = asked.result(), None
            except ScanFailed as error:
                if self._last is None:
                    raise
                # The first reason stays: each other one would be news to all that keep what they have found.
                self._problem = self._problem or str(error)
        assert self._last is not None
        return self._last

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._local.close()
        await self._cluster.close()


class FixedGpuSource:
    def __init__(self, gpus: GpuSet, source: str, ids: Sequence[str] = ()) -> None:
        """GPUs without an id are named by their index, which backends take as well."""
        names = [*ids[: gpus.count], *gpu_names(gpus)[len(ids) :]]
        scanned = (
            ScannedGpu(name, index, gpus.kind, linked_ids(gpus, names, index))
            for index, name in enumerate(names)
        )
        self._scan = GpuScan(tuple(scanned), source=source)

    async def scan(self) -> GpuScan:
        return self._scan

    async def close(self) -> None:
        """Nothing is open."""


def gpu_names(gpus: GpuSet) -> list[str]:
    """Name GPUs without an id: 0, 1…, or cpu, cpu:1…"""
    if not gpus.is_cpu:
        return [str(index) for index in range(gpus.count)]
    return [CPU_ID, *(f"{CPU_ID}:{index}" for index in range(1, gpus.count))]


def linked_ids(gpus: GpuSet, names: Sequence[str], index: int) -> frozenset[str]:
    """The names of the GPUs that one has a fast link to, as is usual for its kind."""
    if gpus.kind.link is GpuLink.NVLINK:
        return frozenset(names) - {names[index]}
    other = index ^ 1
    if gpus.kind.link is GpuLink.NVLINK_PAIR and other < gpus.count:
        return frozenset({names[other]})
    return frozenset()


#: A container's memory limit: cgroup v2, then v1.
_MEMORY_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Logs and databases write all the time: smaller changes do not count.
_DISK_STEP = 10**9
_MEMINFO = Path("/proc/meminfo")
_CPUS = Path("/sys/devices/system/cpu")


def host_facts(data_dir: Path) -> dict[str, object]:
    """Fields of `Hardware`; what cannot be found out is left to its defaults."""
    allowed = frozenset(os.sched_getaffinity(0))
    facts: dict[str, object] = {"cpu_cores": len(allowed), "cores": physical_cores(allowed)}
    memory = host_memory_bytes()
    if memory:
        facts["memory_bytes"] = memory
    with contextlib.suppress(OSError):
        facts["disk_free_bytes"] = shutil.disk_usage(data_dir).free // _DISK_STEP * _DISK_STEP
    return facts


@lru_cache(maxsize=1)
def physical_cores(allowed: frozenset[int], cpus: Path = _CPUS) -> tuple[tuple[int, ...], ...]:
    """The cores available to this process, each with the numbers of its hardware threads, in order."""
    cores = dict[tuple[int, ...], None]()
    for number in sorted(allowed):
        threads = frozenset({number})
        with contextlib.suppress(OSError, ValueError):
            siblings = cpus / f"cpu{number}/topology/thread_siblings_list"
            threads |= cores_in(siblings.read_text(encoding="ascii")) & allowed
        cores[tuple(sorted(threads))] = None
    return tuple(cores)


def host_memory_bytes(meminfo: Path = _MEMINFO, limits: tuple[Path, ...] = _MEMORY_LIMIT_FILES) -> int | None:
    """The memory that this process and its children may use."""
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
