"""Cost of measuring eight GPUs: processor time of daemon and worker, and growth of the store.

The GPUs are those of the tests' stand-in for NVML, which reads a file at every call; a real driver answers
from the kernel. A host that measures is compared with one that only scans.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from statistics import median

from benchmarks import machine, subjects
from benchmarks.report import Report
from core.domain.keys import TaskKey
from miner.api.samples import GpuSample
from miner.dev import stack
from miner.fleet.sampler import OpenMinutes
from miner.store import database
from miner.store.samples import MINUTE, add_minutes, prune_rollups
from tests.doubles.nvml import NvmlHost, compiled, training, uuid

GPUS = 8
DAY_MINUTES = 1440
#: Two days beyond the seven after which minutes are pruned.
DAYS = 9


def run(quick: bool) -> Report:
    seconds, rounds, days = (10.0, 1, 2) if quick else (60.0, 3, DAYS)
    report = Report(
        f"Measuring {GPUS} GPUs every 5 s",
        ("what", "measured", "bar"),
    )
    shares: dict[str, list[float]] = {"5": [], "0": []}
    for _ in range(rounds):
        for interval, found in shares.items():
            found.append(_processor_share(interval, seconds))
    on, off = median(shares["5"]), median(shares["0"])
    report.rows.append(("processor time of measuring", f"{on - off:.2%} of a core", "< 1 %"))
    report.rows.append(("daemon and worker in all, idle", f"{on:.2%} of a core", ""))
    report.rows.append(("the same without measuring", f"{off:.2%} of a core", ""))
    sizes = list(_store_sizes(days))
    report.rows.append(("growth of the store, first day", f"{sizes[0]:.2f} MB", "< 5 MB"))
    if days > 7:
        growth = sizes[-1] - sizes[-2]
        report.rows.append((f"growth of the store, day {days}", f"{growth:.2f} MB", "< 5 MB"))
        report.rows.append((f"the store after {days} days", f"{sizes[-1]:.1f} MB", ""))
    report.data |= {"shares": shares, "store_mb": sizes}
    report.notes.append(
        f"Medians of {rounds} rounds of {seconds:g} s, user and system time of the daemon and its NVML "
        "process, scans every 5 s in both."
    )
    report.notes.append(
        "The store: file sizes, with indices and pages, of the rows that the daemon would write: one for "
        "each GPU and minute, all values known, by UUID, and one for each hour; minutes pruned after 7 days."
    )
    return report


@contextmanager
def _host() -> Iterator[NvmlHost]:
    with tempfile.TemporaryDirectory(prefix="god-miner-bench-") as folder:
        host = NvmlHost(compiled(Path(folder)), Path(folder) / "nvml.json", GPUS)
        for index in range(GPUS):
            host.gpu(index, **training(temperature=60 + index))
        yield host


def _processor_share(interval: str, seconds: float) -> float:
    """Processor seconds per second of a daemon and its children."""
    settings = {
        "GPUS": "nvml",
        "miner.backends.build_fleet.SAMPLE_SECONDS": interval,
        "POLICY": "auto",
        "PROFILE": "auto",
    }
    with _host() as host, subjects.ground() as ground:
        child = stack.daemon_process(ground, {**subjects.QUIET, **settings, **host.environment})
        with child:
            time.sleep(6.0)  # the start, and one round of everything
            before, began = machine.cpu_s(child.pid), time.perf_counter()
            time.sleep(seconds)
            return (machine.cpu_s(child.pid) - before) / (time.perf_counter() - began)


def _store_sizes(days: int) -> Iterator[float]:
    """The file's size after each day, in MB."""
    random, began = Random(1), 1_767_225_600  # a midnight
    with tempfile.TemporaryDirectory(prefix="god-miner-bench-") as folder:
        path = database.prepare_store(Path(folder))
        with closing(database.connect(path)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            before = _size_mb(connection, path)
            for day in range(days):
                for number in range(DAY_MINUTES):
                    now = began + (day * DAY_MINUTES + number) * MINUTE
                    _write_minute(connection, now, random)
                    if number % 10 == 0:
                        while prune_rollups(connection, now, 90 * 86_400):
                            pass
                yield _size_mb(connection, path) - before


def _write_minute(connection: sqlite3.Connection, begin: float, random: Random) -> None:
    minutes = OpenMinutes()
    for index in range(GPUS):
        for at in range(0, MINUTE, 5):
            minutes.add_sample(_sample(begin + at, uuid(index), random))
        minutes.add_time(uuid(index), TaskKey("validator", "task"), begin, begin + MINUTE)
    connection.execute("BEGIN")
    add_minutes(connection, minutes.take())
    connection.execute("COMMIT")


def _sample(at: float, gpu: str, random: Random) -> GpuSample:
    return GpuSample(
        at,
        gpu,
        utilization=random.randint(80, 100) / 100,
        memory_used=random.randint(60, 70) << 30,
        memory_total=80 << 30,
        temperature=random.randint(55, 75),
        power_watts=random.randint(400_000, 700_000) / 1000,
        power_limit_watts=700.0,
        sm_clock_mhz=random.randint(1500, 1980),
        max_sm_clock_mhz=1980,
        throttle=("power",) if random.random() < 0.3 else (),
        pcie_bytes_s=random.random() * 1e9,
        nvlink_bytes_s=random.random() * 1e11,
        ecc_errors=0,
        tensor=random.random(),
        dram=random.random(),
    )


def _size_mb(connection: sqlite3.Connection, path: Path) -> float:
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size / 1e6
