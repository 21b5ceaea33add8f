"""GPU time from the roll-ups of samples: measured, used and idle hours, utilisation, occupancy."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from miner.store.samples import HOUR

#: Whole hours, and minutes before the first and after the last of them. Each minute has its hour.
_ROLLUPS = """
SELECT period, at, gpu, watched, busy, utilization FROM gpu_rollups
WHERE period = 3600 AND at >= :begins AND at + 3600 <= :ends
UNION ALL
SELECT period, at, gpu, watched, busy, utilization FROM gpu_rollups
WHERE period = 60 AND at >= :begins AND at < :first_hour AND at + 60 <= :ends
UNION ALL
SELECT period, at, gpu, watched, busy, utilization FROM gpu_rollups
WHERE period = 60 AND at >= max(:first_hour, :last_hour) AND at + 60 <= :ends
"""


@dataclass(frozen=True, slots=True)
class GpuTime:
    """What the GPUs did in a time. Only measured hours count: a daemon that is down measures none."""

    begins_at: float
    ends_at: float
    measured_hours: float = 0.0
    used_hours: float = 0.0
    #: Mean share of the time in which a kernel ran; None: no GPU says.
    utilization: float | None = None
    #: The same while a job had the GPU.
    utilization_of_jobs: float | None = None
    #: By GPU: the share of each interval in which a job had it; None: not measured.
    occupancy: dict[str, tuple[float | None, ...]] | None = None

    @property
    def idle_hours(self) -> float:
        return self.measured_hours - self.used_hours

    @property
    def used_share(self) -> float | None:
        return self.used_hours / self.measured_hours if self.measured_hours else None


def gpu_time(
    connection: sqlite3.Connection, begins_at: float, ends_at: float, intervals: int = 24
) -> GpuTime:
    """Add up the roll-ups of a time. `intervals`: of the occupancy, of equal length."""
    measured = used = kernels = measured_kernels = job_kernels = job_hours = 0.0
    length = (ends_at - begins_at) / intervals
    cells: dict[str, list[list[float]]] = {}
    times = {
        "begins": begins_at,
        "ends": ends_at,
        "first_hour": -(-begins_at // HOUR) * HOUR,
        "last_hour": ends_at // HOUR * HOUR,
    }
    for period, at, gpu, watched, busy, utilization in connection.execute(_ROLLUPS, times):
        hours = period / HOUR
        measured += watched * hours
        used += busy * hours
        if utilization is not None:
            measured_kernels += watched * hours
            kernels += utilization * watched * hours
            if busy > 0:  # kernels run for jobs; the rest of such a period is next to nothing
                job_hours += busy * hours
                job_kernels += min(utilization * watched, busy) * hours
        row = cells.setdefault(gpu, [[0.0, 0.0] for _ in range(intervals)])
        cell = row[min(int((at - begins_at) / length), intervals - 1)]
        cell[0] += watched * hours
        cell[1] += busy * hours
    occupancy = {
        gpu: tuple(busy / hours if hours else None for hours, busy in row)
        for gpu, row in sorted(cells.items())
    }
    return GpuTime(
        begins_at,
        ends_at,
        measured,
        used,
        kernels / measured_kernels if measured_kernels else None,
        job_kernels / job_hours if job_hours else None,
        occupancy or None,
    )
