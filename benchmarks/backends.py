"""Overhead of a backend: from the start request to the first line of the training's code, and back."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report
from tests.doubles import base_image, dockerd
from tests.doubles.backend_bench import BackendBench, docker_bench, process_bench
from tests.doubles.backend_fixtures import own_dockerd

#: Says when it runs, and ends when it is told to.
PAYLOAD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open("up", "w") as file:
    file.write(repr(time.time()))
time.sleep(60)
"""
STEPS = ("submit answered", "first line of the run", "poll", "from stop to its end known", "remove")


def run(quick: bool) -> Report:
    rounds = 5 if quick else 30
    report = Report(f"What a backend costs, median of {rounds} runs, ms", ("backend", *STEPS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _measure(report, "process", lambda: process_bench(folder / "p", sandbox=False), rounds)
        sandboxed = process_bench(folder / "s", sandbox=True)
        if sandboxed.backend.can_sandbox:
            _measure(report, "process, sandbox", lambda: sandboxed, rounds)
        else:
            report.notes.append("No sandbox can be made here.")
        why_not = dockerd.why_not()
        if why_not:
            report.notes.append(f"Docker was not measured: {why_not}.")
            return report
        with own_dockerd() as docker:
            _measure(
                report, "docker", lambda: docker_bench(folder / "d", docker.host, base_image.NAME), rounds
            )
    report.notes.append("Docker with a small image and pretend GPUs; the trainer's own imports come on top.")
    return report


def _measure(report: Report, name: str, make: Callable[[], BackendBench], rounds: int) -> None:
    times = asyncio.run(_rounds(make(), rounds))
    medians = [statistics.median(step) * 1000 for step in zip(*times, strict=True)]
    report.rows.append((name, *(f"{value:.1f}" for value in medians)))
    report.data[name] = dict(zip(STEPS, medians, strict=True))


async def _rounds(bench: BackendBench, rounds: int) -> list[tuple[float, ...]]:
    times: list[tuple[float, ...]] = []
    for _ in range(rounds):
        began = time.time()
        run = await bench.submit(bench.code(PAYLOAD))
        submitted = time.time()
        up = float(await bench.said(run, "up"))
        asked = time.time()
        await bench.status(run)
        polled = time.time()
        await bench.backend.stop(run.ref)
        await bench.end_of(run)
        ended = time.time()
        await bench.backend.remove(run.ref)
        removed = time.time()
        run.ref = ""
        times.append((submitted - began, up - began, polled - asked, ended - polled, removed - ended))
    await bench.backend.close()
    return times
