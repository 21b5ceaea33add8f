"""Overhead of Slurm: submit, begin, and the polls of a hundred running jobs."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.report import Report
from miner.backends.base import START_FILE
from miner.jobs.timeline import JobTimings
from tests.doubles.backend_bench import BackendBench, Run, slurm_bench
from tests.doubles.slurm import OwnSlurm, own_slurm

#: As the daemon asks, by default.
POLL_S = JobTimings().backend_poll_s
SLURM_POLL_S = 5.0


def run(quick: bool) -> Report:
    submits, running, watched_s = (5, 10, 10.0) if quick else (40, 100, 60.0)
    report = Report("What Slurm adds to a training", ("what", "median", "90 %", "longest"))
    with tempfile.TemporaryDirectory() as name, own_slurm(nodes=2, gpus=0, cpus=256) as slurm:
        bench = slurm_bench(Path(name) / "data", slurm.bin, poll_s=SLURM_POLL_S, slurm_cpus_per_gpu=1)
        asyncio.run(_measure(report, bench, slurm, submits, running, watched_s))
    report.notes.append(
        "On one machine, whose controller looks for jobs to start once a second; a stand-in in front of each "
        "command counts the calls, and is part of the cost."
    )
    return report


async def _measure(
    report: Report, bench: BackendBench, slurm: OwnSlurm, submits: int, running: int, watched_s: float
) -> None:
    answered, begun = [], []
    for _ in range(submits):
        began = time.time()
        run = await bench.submit(bench.spec("true"))
        answered.append(time.time() - began)
        started = json.loads(await bench.said(run, START_FILE))
        begun.append(float(started["at"]) - began)
        await bench.end_of(run)
    _row(report, "submit to reference, ms", [value * 1000 for value in answered])
    _row(report, "submit to the wrapper's start, s", begun)
    runs = [await bench.submit(bench.spec("sleep", "3600")) for _ in range(running)]
    for one in runs:
        await bench.said(one, START_FILE)
    await _watch(report, bench, slurm, runs, watched_s)
    await asyncio.gather(*(bench.backend.stop(one.ref, force=True) for one in runs))
    await bench.clear()


async def _watch(
    report: Report, bench: BackendBench, slurm: OwnSlurm, runs: list[Run], seconds: float
) -> None:
    before, calls, began = _cpu_s(), len(slurm.calls()), time.monotonic()
    polls = 0
    while time.monotonic() < began + seconds:
        turn = time.monotonic()
        await asyncio.gather(*map(bench.status, runs))
        polls += len(runs)
        await asyncio.sleep(max(turn + POLL_S - time.monotonic(), 0))
    took = time.monotonic() - began
    new = slurm.calls()[calls:]
    squeues = sum(call.startswith("squeue") for call in new)
    share = (_cpu_s() - before) / took
    report.data["polling"] = {
        "runs": len(runs), "polls": polls, "seconds": took, "core": share, "squeue": squeues,
        "others": len(new) - squeues,
    }  # fmt: skip
    report.notes.append(
        f"{len(runs)} running jobs, each polled every {POLL_S:g} s for {took:.0f} s: {share:.1%} of a core, "
        f"children included; {squeues} calls of squeue, {len(new) - squeues} of other commands."
    )


def _row(report: Report, name: str, values: list[float]) -> None:
    ninth = statistics.quantiles(values, n=10, method="inclusive")[-1]
    figures = (statistics.median(values), ninth, max(values))
    report.rows.append((name, *(f"{figure:.3g}" for figure in figures)))
    report.data[name] = values


def _cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
