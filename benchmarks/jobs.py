"""Overhead of the job pipeline, by backend: from a start to its first step, and a restart.

The trainer is one that does nothing (`tests/integration/jobs/payload.py`), inputs are at hand, so what is
measured is ours: store, planning, GPUs, folders, the backend, and noticing the first step.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.report import Report
from core.domain.job_states import JobState
from miner.backends.base import Backend
from miner.backends.registry import build_here
from miner.jobs.timeline import JobTimings
from miner.settings import BackendKind, Settings
from miner.store import database
from miner.store import jobs as store_jobs
from tests.doubles import base_image, dockerd
from tests.doubles.base_image import PYTHON
from tests.integration.jobs.field import Field, Files, field_of, field_settings

#: The daemon's own timings; a first step is noticed when its file is looked at.
PACE = JobTimings()
OVER = 1000
RUNNING = 4


def run(quick: bool) -> Report:
    report = Report(
        "From a start to the first step, and a restart (the trainer does nothing)",
        ("backend", "what", "median s", "worst s"),
    )
    rounds = 3 if quick else 10
    for name in ("process", "docker"):
        if name == "docker" and (why := dockerd.why_not()):
            report.notes.append(f"No Docker here: {why}")
            continue
        for what, taken in asyncio.run(_measured(name, rounds)).items():
            report.rows.append((name, what, f"{median(taken):.2f}", f"{max(taken):.2f}"))
            report.data[f"{name}: {what}"] = taken
    report.notes.append(
        f"A step counts as seen when the daemon has told displays of it; it looks every {PACE.poll_s:g} s."
    )
    report.notes.append(f"Restart: {OVER:,} jobs in the store that are over, {RUNNING} in training.")
    return report


async def _measured(name: str, rounds: int) -> dict[str, list[float]]:
    with _place() as folder, Files() as files:
        async with (
            _backend(name, folder) as (backend, settings),
            field_of(backend, settings, files, light=True, timings=PACE) as field,
        ):
            overhead = [await _first_step(field, number) for number in range(rounds)]
            restarts = await _restarts(field, rounds)
    return {
        "start recorded → its process began": [launch for launch, _ in overhead],
        "start recorded → first step seen": [seen for _, seen in overhead],
        "restart → all four looked after": restarts,
    }


async def _first_step(field: Field, number: int) -> tuple[float, float]:
    began = time.time()
    job = await field.start(f"t{number}", {"*": {"steps": 10**6, "step_s": 0.05}})
    await field.training(job)
    seen = time.time()
    await field.jobs.cancel(job)
    await field.over(job, 120)
    start = (field.data_dir / f"jobs/{job}/attempt_1/start.json").stat().st_mtime
    return start - began, seen - began


async def _restarts(field: Field, rounds: int) -> list[float]:
    await _fill(field)
    jobs = [await field.start(f"long{n}", {"*": {"steps": 10**6, "step_s": 0.2}}) for n in range(RUNNING)]
    for job in jobs:
        await field.training(job)
    taken = []
    for _ in range(rounds):
        await field.jobs.stop()
        began = time.perf_counter()
        await field.up()
        for job in jobs:
            await field.training(job)
        taken.append(time.perf_counter() - began)
        assert [field.launches(job) for job in jobs] == [1] * RUNNING
    for job in jobs:
        await field.jobs.cancel(job)
        await field.over(job, 120)
    return taken


async def _fill(field: Field) -> None:
    """Jobs that are over, each with an attempt."""
    first = await field.store.read(store_jobs.newest_jobs, 1)
    assert first
    with database.connect(field.store.path) as db:
        columns = (
            "validator, task_type, model, hours, state, end_reason, started_at, deadline_at, starts, "
            "request, lock_token, updated_at"
        )
        db.executemany(
            f"INSERT INTO jobs (task_id, {columns}) SELECT ?, {columns} FROM jobs WHERE id = ?",
            [(f"old{number}", first[0].id) for number in range(OVER)],
        )
    assert first[0].state is JobState.CANCELLED


@asynccontextmanager
async def _backend(name: str, folder: Path) -> AsyncIterator[tuple[Backend, Settings]]:
    if name == "process":
        settings = field_settings(folder / "data", trainer_python=PYTHON, trainer_sandbox="off")
        backend: Backend = build_here(settings, BackendKind.PROCESS)
        yield backend, settings
        await backend.close()
        return
    with dockerd.Dockerd(folder / "d") as host:
        base_image.load(host.host)
        settings = field_settings(folder / "data", docker_host=host.host, trainer_text_image=base_image.NAME)
        backend = build_here(settings, BackendKind.DOCKER)
        yield backend, settings
        await backend.close()


@contextmanager
def _place() -> Iterator[Path]:
    """Short: a socket's path has 107 letters at most."""
    folder = Path(tempfile.mkdtemp(prefix="gm-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
