"""Add up what is measured of each GPU until a minute is over."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from core.domain.keys import TaskKey
from miner.fleet.samples import GpuSample
from miner.store.samples import MINUTE, GpuRollup


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
        for name, value in _averaged(sample).items():
            if value is not None:
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + value, count + 1
        for name, value in (("memory", sample.memory_share), ("temperature", sample.temperature)):
            if value is not None:
                self.highest[name] = max(value, self.highest.get(name, value))

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


def _averaged(sample: GpuSample) -> dict[str, float | None]:
    clock = None
    if sample.sm_clock_mhz is not None and sample.max_sm_clock_mhz:
        clock = sample.sm_clock_mhz / sample.max_sm_clock_mhz
    return {
        "utilization": sample.utilization,
        "power": sample.power_watts,
        "clock": clock,
        "throttled": None if sample.throttle is None else float(bool(sample.throttle)),
        "tensor": sample.tensor,
        "dram": sample.dram,
        "pcie": sample.pcie_bytes_s,
        "nvlink": sample.nvlink_bytes_s,
    }


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
