"""Measure GPUs and host in the background: into the history in memory, and by the minute into the store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from core.domain.keys import TaskKey
from miner.api.samples import GPU_NUMBERS, HIGHEST, GpuRollup, GpuSample, HostSample
from miner.fleet.base import Gpu
from miner.fleet.fleet import Fleet
from miner.fleet.nvml import NumberedSample
from miner.fleet.sources import NoNvidiaDriver, ScanFailed
from miner.store.database import StoreUnavailable
from miner.store.samples import MINUTE, add_minutes, record_gpus
from miner.store.store import Store

#: How much is kept in memory; older measurements are in the store, rolled up.
KEPT_SECONDS = 3600.0
#: A GPU whose newest sample is older than this is not measured now.
FRESH_SECONDS = 30.0

SampleT = TypeVar("SampleT", GpuSample, HostSample)

log = logging.getLogger(__name__)

#: After a failure the pause doubles up to this: a driver that hangs is left alone.
MAX_PAUSE_SECONDS = 300.0
#: A longer time between two samples (a machine that slept) counts as not watched.
MAX_GAP_SECONDS = 120.0
#: Minutes of GPUs that wait for a disk which is full: of eight GPUs, four hours.
MAX_UNSTORED = 2000
_STAT = Path("/proc/stat")
_MEMINFO = Path("/proc/meminfo")


class SampleHistory:
    """The last hour of measurements, by GPU. For one event loop."""

    def __init__(self, kept_seconds: float = KEPT_SECONDS) -> None:
        self._kept = kept_seconds
        self._gpus: dict[str, deque[GpuSample]] = {}
        self._host: deque[HostSample] = deque()

    def add(self, samples: Iterable[GpuSample], host: HostSample | None = None) -> None:
        for sample in samples:
            self._append(self._gpus.setdefault(sample.gpu, deque()), sample)
        if host is not None:
            self._append(self._host, host)
            self._forget_gone(host.at - self._kept)

    @property
    def gpus(self) -> list[str]:
        return list(self._gpus)

    def latest(self, gpu: str, since: float = 0.0) -> GpuSample | None:
        """The newest sample. `since`: an older one does not count, because the GPU may have vanished."""
        kept = self._gpus.get(gpu)
        return kept[-1] if kept and kept[-1].at >= since else None

    def since(self, gpu: str, moment: float) -> list[GpuSample]:
        return _newer(self._gpus.get(gpu, ()), moment)

    @property
    def host(self) -> HostSample | None:
        return self._host[-1] if self._host else None

    def host_since(self, moment: float) -> list[HostSample]:
        return _newer(self._host, moment)

    def _append(self, kept: deque[SampleT], sample: SampleT) -> None:
        while kept and kept[-1].at > sample.at:  # the clock was put back: they would never become old
            kept.pop()
        kept.append(sample)
        while kept[0].at < sample.at - self._kept:
            kept.popleft()

    def _forget_gone(self, before: float) -> None:
        for gpu in [gpu for gpu, kept in self._gpus.items() if kept[-1].at < before]:
            del self._gpus[gpu]


def _newer(kept: Sequence[SampleT], moment: float) -> list[SampleT]:
    newest_first = itertools.takewhile(lambda sample: sample.at >= moment, reversed(kept))
    return list(newest_first)[::-1]


@dataclass
class _MinuteTotals:
    """One GPU in one minute."""

    watched_s: float = 0.0
    held_s: defaultdict[TaskKey, float] = field(default_factory=lambda: defaultdict(float))
    samples: int = 0
    #: Name → the sum of its values, and how many samples have it.
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    highest: dict[str, Any] = field(default_factory=dict)

    def add(self, sample: GpuSample) -> None:
        self.samples += 1
        for number in GPU_NUMBERS:
            name, value = number.column, getattr(sample, number.name)
            if not name or value is None:
                continue
            if name in HIGHEST:
                self.highest[name] = max(value, self.highest.get(name, value))
            else:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + value, count + 1

    def rollup(self, at: int, gpu: str) -> tuple[GpuRollup, TaskKey | None]:
        longest = max(self.held_s, key=self.held_s.__getitem__, default=None)
        values: dict[str, Any] = {name: total / count for name, (total, count) in self.sums.items()}
        row = GpuRollup(
            MINUTE,
            at,
            gpu,
            watched=min(self.watched_s / MINUTE, 1.0),
            busy=min(sum(self.held_s.values()) / MINUTE, 1.0),
            samples=self.samples,
            **values,
            **self.highest,
        )
        return row, longest


class OpenMinutes:
    """The minutes that are not in the store yet."""

    def __init__(self) -> None:
        self._totals: dict[tuple[int, str], _MinuteTotals] = {}

    def add_time(self, gpu: str, holder: TaskKey | None, begin: float, end: float) -> None:
        """The GPU was watched in this time, and `holder` had it."""
        while begin < end:
            minute = int(begin // MINUTE) * MINUTE
            part = min(end, minute + MINUTE) - begin
            totals = self._at(minute, gpu)
            totals.watched_s += part
            if holder is not None:
                totals.held_s[holder] += part
            begin = minute + MINUTE

    def add_sample(self, sample: GpuSample) -> None:
        self._at(int(sample.at // MINUTE) * MINUTE, sample.gpu).add(sample)

    def take(self, before: float = float("inf")) -> list[tuple[GpuRollup, TaskKey | None]]:
        """The minutes that were over by then, each with the task that had the GPU longest. They are forgotten
        here."""
        over = sorted(key for key in self._totals if key[0] + MINUTE <= before)
        return [self._totals.pop(key).rollup(*key) for key in over]

    def _at(self, minute: int, gpu: str) -> _MinuteTotals:
        return self._totals.setdefault((minute, gpu), _MinuteTotals())


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


class SampleSource(Protocol):
    """Measures the GPUs of this host."""

    async def sample(self) -> list[NumberedSample]:
        """Ends in a bounded time. `ScanFailed`: nothing was measured."""

    async def close(self) -> None: ...


class GpuSampler:
    def __init__(
        self,
        source: SampleSource,
        fleet: Fleet,
        history: SampleHistory,
        store: Store,
        host: HostMeter,
        *,
        interval: float,
    ) -> None:
        """`interval`: seconds between two samples; 0: nothing is measured."""
        self._source, self._fleet, self._history, self._store, self._host = (
            source,
            fleet,
            history,
            store,
            host,
        )
        self.interval = interval
        self._clock = fleet.clock
        self._minutes = OpenMinutes()
        self._unstored: list[tuple[GpuRollup, TaskKey | None]] = []
        self._stored_kinds: dict[str, str] = {}
        self._last_tick: float | None = None
        self._pause_until = self._pause = 0.0
        self._task: asyncio.Task[None] | None = None
        #: The reason why the GPUs are not measured, or None if they are.
        self.problem: str | None = None

    def start(self) -> None:
        if self.interval > 0:
            self._task = asyncio.create_task(self._run(), name="sampler")

    async def stop(self) -> None:
        """Stop, and store what was measured of the current minute."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            await self._store_minutes(float("inf"))
        await self._source.close()

    async def sample(self) -> None:
        """Measure once."""
        now = self._clock()
        self._count_time(now)
        self._history.add((), self._host.sample(now))
        await self._store_minutes(now)  # first: what follows may fail
        samples = samples_of_fleet(self._fleet.inventory.gpus, await self._measure(now), self._clock())
        self._history.add(samples)
        for sample in samples:
            self._minutes.add_sample(sample)

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.sample()
            except Exception:  # a bug here must not end the measurements for good
                log.exception("measuring failed unexpectedly; it is tried again")
            await asyncio.sleep(max(self.interval - (time.monotonic() - began), 0.1))

    def _count_time(self, now: float) -> None:
        """Count who had which GPU since the last sample: also GPUs that nothing is measured of."""
        before, self._last_tick = self._last_tick, now
        if before is None or not 0 < now - before <= MAX_GAP_SECONDS:
            return
        holders = {
            gpu: claim.key for claim in self._fleet.ledger.claims if claim.is_running for gpu in claim.gpus
        }
        for gpu in self._fleet.inventory.gpus:
            # Of a cluster's thousands only ours count: what others leave idle is not our time.
            if not gpu.node or gpu.id in holders:
                self._minutes.add_time(gpu.id, holders.get(gpu.id), before, now)

    async def _measure(self, now: float) -> list[NumberedSample]:
        if 0 < self._pause_until - now <= MAX_PAUSE_SECONDS:  # further ahead: the clock was put back
            return []
        try:
            samples = await self._source.sample()
        except ScanFailed as error:
            if self.problem is None and not isinstance(error, NoNvidiaDriver):
                log.warning("the GPUs cannot be measured; it is tried again: %s", error)
            self.problem = str(error)
            is_final = isinstance(error, NoNvidiaDriver)
            self._pause = (
                MAX_PAUSE_SECONDS if is_final else min(2 * self._pause or self.interval, MAX_PAUSE_SECONDS)
            )
            self._pause_until = self._clock() + self._pause
            return []
        self.problem, self._pause = None, 0.0
        return samples

    async def _store_minutes(self, now: float) -> None:
        """Store the minutes that are over; those that a full disk refused too."""
        refused, self._unstored = self._unstored, []
        over = refused + self._minutes.take(now)
        if not over:
            return
        try:
            if (kinds := self._fleet.inventory.kinds) != self._stored_kinds:
                await self._store.write(record_gpus, kinds)
                self._stored_kinds = kinds
            await self._store.write(add_minutes, over)
        except StoreUnavailable as error:
            self._unstored = over[-MAX_UNSTORED:]
            if not refused:
                log.warning("measurements cannot be stored; it is tried again: %s", error)


def samples_of_fleet(gpus: Iterable[Gpu], measured: Sequence[NumberedSample], at: float) -> list[GpuSample]:
    """The samples under the fleet's names: UUIDs, or numbers where GPUS or FLEET_FILE has no UUIDs."""
    by_uuid = {numbered.sample.gpu: numbered.sample for numbered in measured}
    by_number = {str(numbered.index): numbered.sample for numbered in measured}
    samples = []
    for gpu in gpus:
        sample = by_uuid.get(gpu.id) or by_number.get(gpu.id)
        if sample is not None:
            samples.append(replace(sample, at=at, gpu=gpu.id))
    return samples
