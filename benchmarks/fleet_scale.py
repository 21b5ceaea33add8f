"""Cost of a large cluster to the daemon: 1,000 GPUs, and as many jobs as they take.

Deciding, reserving and the queue on a simulated day, beside a plain rule; Slurm's answers of such a site;
what the jobs leave in the store. `fleet_day` and `fleet_store` do the work.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles

from benchmarks import subjects
from benchmarks.busy_store import fill_store
from benchmarks.fleet_day import (
    DAY,
    HOUR,
    NODES,
    POLICY,
    PROFILE,
    WARM_UP,
    DayResult,
    SimulatedDay,
    cluster,
    first_free_node,
    offers_of_a_day,
)
from benchmarks.fleet_store import FleetWriter, size_of
from benchmarks.report import Report
from core.domain.hardware import parse_gpus
from miner.backends.registry import ClusterContext
from miner.backends.slurm.commands import SlurmCommands
from miner.backends.slurm.gpu_source import ClusterScope, SlurmGpuSource
from miner.backends.slurm.jobs import SlurmJobs, parse_sacct
from miner.dev.stack import daemon_process
from miner.fleet.fleet import Fleet
from miner.store import database, events

OFFERS_A_DAY = 10_000
#: Of the cluster's other users, beside our own.
RUNNING_JOBS, WAITING_JOBS, OUR_JOBS, ACCOUNTED_JOBS = 1_000, 9_000, 1_000, 50_000
DECIDE_BAR_MS, STORE_BAR = 10.0, 10**9
JOBS_A_DAY, MONTH_DAYS = 10_000, 30
#: Offers for each job.
OFFERS_A_JOB = 3


def run(quick: bool) -> Report:
    report = Report("What 1,000 GPUs cost the daemon", ("what", "how often", "median", "95 %", "longest"))
    _add_day(report, 7.0 if quick else 24.0)
    asyncio.run(_add_answers(report, 3 if quick else 10))
    _add_store(report, 100 if quick else 400)
    _add_restart(report, JOBS_A_DAY if quick else JOBS_A_DAY * MONTH_DAYS)
    report.notes.append(
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    )
    return report


def _add_day(report: Report, hours: float) -> None:
    offers = offers_of_a_day(5, hours, OFFERS_A_DAY)
    ours = asyncio.run(SimulatedDay(offers, hours).run())
    peer = first_free_node(offers, hours)
    for name, calls in (
        ("decide about an offer", ours.decisions),
        ("reserve what was decided", ours.reserves),
        ("look whose turn it is", ours.passes),
    ):
        _add_row(report, f"{name}, ms of CPU", calls.cpu)
        report.data[name] = {"wall_ms": calls.wall, "cpu_ms": calls.cpu}
    report.notes += [
        f"{sum(count for count, *_ in NODES)} nodes of three kinds, others on a tenth of them; policy "
        f"{POLICY}, profile {PROFILE}; {len(offers):,} offers in {hours:g} h, each with a model's name "
        f"that was never seen; measured after {WARM_UP / HOUR:g} h. The bar for deciding is "
        f"{DECIDE_BAR_MS:g} ms.",
        _day_note("ours", ours)
        + f", {ours.most_running:,} running at most, {mean(ours.waits):.0f} s from a start to its GPUs on "
        f"average and {max(ours.waits):.0f} s at most, {ours.late} ended by their deadline",
        _day_note("the first node that is free, without a queue", peer),
    ]
    for name, result in (("ours", ours), ("first free", peer)):
        report.data[f"day/{name}"] = {
            "accepted": result.accepted, "points": result.points, "used": result.used_hours,
            "capacity": result.all_hours, "refused": dict(result.refused),
        }  # fmt: skip


def _day_note(name: str, day: DayResult) -> str:
    share = day.used_hours / day.all_hours if day.all_hours else 0.0
    refused = ", ".join(f"{rule} {count:,}" for rule, count in day.refused.most_common(3))
    why = f" (refused: {refused})" if refused else ""
    return (
        f"{name}: {day.accepted:,} of {day.offers:,} offers accepted{why}, "
        f"{share:.0%} of the GPU-hours used, {day.points:,.0f} points expected"
    )


def _add_row(report: Report, name: str, values: Sequence[float]) -> None:
    ninety_fifth = quantiles(values, n=20)[18] if len(values) > 1 else values[0]
    figures = (median(values), ninety_fifth, max(values))
    report.rows.append((name, f"{len(values):,}", *(f"{figure:.3g}" for figure in figures)))


async def _add_answers(report: Report, rounds: int) -> None:
    """Stand-ins for the commands, which print what a busy site would."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_commands(folder)
        commands = SlurmCommands(str(folder))
        context = ClusterContext(kinds=dict, host=dict, is_in_use=lambda _gpu: False, clock=time.time)
        scan: Callable[[], object] = lambda: SlurmGpuSource(  # noqa: E731 - a new one asks each time
            ClusterScope(), commands, "god-miner-", context
        ).scan()
        poll: Callable[[], object] = lambda: SlurmJobs(commands, 5.0).all()  # noqa: E731
        for what, ask in (("one scan of the nodes", scan), ("one poll of all our jobs", poll)):
            cpu: list[float] = []
            blocked: list[float] = []
            for _ in range(rounds):
                async with LoopStops(blocked):
                    began = time.process_time()
                    await ask()  # type: ignore[misc]
                    cpu.append((time.process_time() - began) * 1e3)
            _add_row(report, f"{what}, ms of CPU", cpu)
            _add_row(report, f"{what}, longest stop of the event loop, ms", blocked)
            report.data[what] = {"cpu_ms": cpu, "blocked_ms": blocked}
        text, began = _accounted(), time.process_time()
        rows = sum(1 for _ in parse_sacct(text))
        report.notes.append(
            f"Slurm has {RUNNING_JOBS + WAITING_JOBS + OUR_JOBS:,} jobs, {OUR_JOBS:,} of them ours. The "
            f"daemon asks the accounting for single jobs only; {rows:,} rows of it would take "
            f"{(time.process_time() - began) * 1e3:.0f} ms."
        )


class LoopStops:
    """Add the longest time in which the event loop did nothing else, in ms."""

    def __init__(self, found: list[float]) -> None:
        self._found, self._longest = found, 0.0

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.005)
        self._task.cancel()
        self._found.append(self._longest * 1e3)

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self._longest = max(self._longest, time.perf_counter() - before - 0.001)


def _write_commands(folder: Path) -> None:
    for name, text in {
        "nodes": _nodes(), "jobs": _jobs(), "partitions": _PARTITION, "reservations": "", "squeue": _squeue(),
    }.items():  # fmt: skip
        (folder / f"{name}.txt").write_text(text)
    for program, what in (("scontrol", "for last; do :; done"), ("squeue", "last=squeue")):
        path = folder / program
        path.write_text(f'#!/bin/sh\n{what}\nexec cat "{folder}/$last.txt"\n')
        path.chmod(0o755)


#: What the names of our jobs begin with.
_OURS = "god-miner-0123456789abcdef"
_PARTITION = (
    "PartitionName=train AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[001-135] State=UP TotalCPUs=23000\n"
)


def _each_node() -> Iterator[tuple[str, int, str, int, int]]:
    """Name, GPUs, their type, CPUs, megabytes."""
    number = 0
    for count, text, cores, memory in NODES:
        gpus = parse_gpus(text)
        for _ in range(count):
            number += 1
            yield f"n{number:03d}", gpus.count, text.partition("x")[2].lower(), cores, memory >> 20


def _nodes() -> str:
    return "".join(
        f"NodeName={name} Arch=x86_64 CoresPerSocket=48 CPUAlloc=64 CPUEfctv={cores} CPUTot={cores} "
        f"CPULoad=8.01 AvailableFeatures=ib ActiveFeatures=ib Gres=gpu:{kind}:{gpus} GresDrain=N/A "
        f"GresUsed=gpu:{kind}:{gpus - 1}(IDX:0-{gpus - 2}) NodeAddr={name} NodeHostName={name} "
        f"Version=23.11.4 OS=Linux 6.1 RealMemory={memory} AllocMem={memory // 2} FreeMem=20000 "
        f"Sockets=2 Boards=1 State=MIXED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
        f"Partitions=train "
        f"BootTime=1700000000 SlurmdStartTime=1700000100 LastBusyTime=1700000200 CfgTRES=cpu={cores} "
        f"AllocTRES=cpu=64\n"
        for name, gpus, kind, cores, memory in _each_node()
    )


def _jobs() -> str:
    draw, nodes = Random(4), list(_each_node())
    lines = []
    for number in range(RUNNING_JOBS + OUR_JOBS):
        name, _, kind, *_ = nodes[number % len(nodes)]
        whose = f"{_OURS}-{number}-1" if number < OUR_JOBS else f"train_{number}.sh"
        lines.append(
            f"{_job(number, whose, 'RUNNING', draw)} NodeList={name} BatchHost={name} NumNodes=1 NumCPUs=16 "
            f"JOB_GRES=gpu:{kind}:1   Nodes={name} CPU_IDs=0-15 Mem=64000 GRES=gpu:{kind}:1(IDX:0) "
            f"OverSubscribe=OK Command=/home/user/train.sh WorkDir=/home/user\n"
        )
    lines += [
        f"{_job(RUNNING_JOBS + OUR_JOBS + number, f'sweep-{number}', 'PENDING', draw)} NodeList=(null) "
        "NumNodes=1 NumCPUs=16 OverSubscribe=OK TresPerNode=gres/gpu:1 Command=/home/user/sweep.sh "
        "WorkDir=/home/user\n"
        for number in range(WAITING_JOBS)
    ]
    return "".join(lines)


def _job(number: int, name: str, state: str, draw: Random) -> str:
    start = 1_800_000_000 - draw.randrange(int(DAY)) if state == "RUNNING" else "Unknown"
    return (
        f"JobId={number} JobName={name} UserId=user(1000) GroupId=user(1000) MCS_label=N/A "
        f"Priority=4294 Nice=0 Account=lab QOS=normal JobState={state} Reason=None Dependency=(null) "
        f"Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=01:00:00 TimeLimit=1-00:00:00 "
        f"TimeMin=N/A SubmitTime=1799900000 EligibleTime=1799900000 StartTime={start} "
        "EndTime=Unknown Deadline=N/A Partition=train"
    )


def _squeue() -> str:
    return "".join(
        f"{number}|RUNNING|1800000000|1800086400|n{number % 135 + 1:03d}|None|{_OURS}-{number}-1\n"
        for number in range(OUR_JOBS)
    )


def _accounted() -> str:
    return "".join(
        f"{number}|COMPLETED|0:0|1799900000|1799990000|n{number % 135 + 1:03d}|{_OURS}-{number}-1\n"
        for number in range(ACCOUNTED_JOBS)
    )


def _add_store(report: Report, batch: int) -> None:
    """Growth once the newest are as many as are kept in full: with a hundredth of those numbers, and batches
    of jobs."""
    with tempfile.TemporaryDirectory() as name, _fewer_kept(100) as kept_bytes:
        path = database.prepare_store(Path(name) / "store")
        with closing(database.connect(path)) as connection:
            writer = FleetWriter(connection, Fleet(cluster()).snapshot(0.0), POLICY, PROFILE)
            offers = offers_of_a_day(5, 24.0, 6 * batch * OFFERS_A_JOB * 1.1)
            sizes, counts, step = [], [], batch * OFFERS_A_JOB
            for first in range(0, 5 * step, step):
                writer.write(offers[first : first + step], OFFERS_A_JOB)
                writer.prune(0.0)
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                sizes.append(size_of(path))
                counts.append(writer.jobs)
    grown = [
        (size - before) / (count - earlier)
        for size, before, count, earlier in zip(sizes[1:], sizes, counts[1:], counts, strict=False)
    ]
    report.data["store"] = {"sizes": sizes, "jobs": counts, "bytes_each": grown, "kept": kept_bytes}
    month = mean(grown[-2:]) * JOBS_A_DAY * MONTH_DAYS
    full = sizes[0] / counts[0]
    report.notes.append(
        f"Store: {', '.join(f'{value / 1e3:.1f}' for value in grown)} kB for each further job and its "
        f"{OFFERS_A_JOB} offers, batch by batch; {full / 1e3:.1f} kB while all is kept in full, as of the "
        f"newest {events.MAX_DETAILED_ATTEMPTS:,}: {full * events.MAX_DETAILED_ATTEMPTS / 1e9:.2f} GB. At "
        f"{JOBS_A_DAY:,} jobs a day it grows by {month / 1e9:.2f} GB a month; the bar is "
        f"{STORE_BAR / 1e9:g} GB."
    )


def _add_restart(report: Report, jobs: int) -> None:
    """With a month of ended jobs in the store."""
    with subjects.ground() as stack:
        fill_store(stack, jobs, events.MAX_OFFERS)
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            with daemon_process(stack, {"POLICY": "h100x4", "GPUS": "4xH100", **subjects.QUIET}):
                taken.append(time.perf_counter() - began)
        size = size_of(stack.data_dir / database.FILE_NAME) / 1e9
    _add_row(report, f"start with {jobs:,} ended jobs ({size:.2f} GB), to the first answer, s", taken)
    report.data["restart_s"] = taken


@contextmanager
def _fewer_kept(part: int) -> Iterator[dict[str, int]]:
    names = ("MAX_OFFERS", "MAX_EVENTS", "MAX_DETAILED_ATTEMPTS")
    before = {name: getattr(events, name) for name in names}
    for name in names:
        setattr(events, name, before[name] // part)
    try:
        yield before
    finally:
        for name, value in before.items():
            setattr(events, name, value)
