"""Jobs on the operator's port: list, show, start, cancel, retry, read logs, curves, plans and files, and
follow events."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from core.domain.job_states import JobState
from miner.api.comparison import JobComparison
from miner.api.jobs import (
    JobDetails,
    JobFiles,
    JobLabels,
    JobList,
    JobSeries,
    JobSummary,
    LogChunk,
    StartedJob,
)
from miner.api.plans import PlanDetails
from miner.fleet.costs import GpuCosts
from miner.http.operator import MAX_ROW, Daemon, OperatorDaemon, caller_address, operator_only
from miner.jobs import views
from miner.jobs.comparison import MOST_JOBS, compare_jobs
from miner.jobs.figures import FiguresSnapshot
from miner.jobs.folder import job_folder
from miner.jobs.manager import JobManager
from miner.jobs.tasks import OPERATOR, read_task_file
from miner.jobs.views import last_log_lines, read_log_chunk, select_attempt
from miner.settings.values import is_loopback
from miner.store import jobs as store_jobs
from miner.store.attempts import attempts_of
from miner.store.jobs import JobFilter, JobRow, find_job
from miner.store.store import Store

#: Without a line now and then, a proxy or a laptop that slept would hold a dead stream for ever.
HEARTBEAT_SECONDS = 15.0
MAX_JOBS_LISTED = 1000
MAX_LOG_BYTES = 1 << 20
MAX_TAIL_LINES = 1000
MAX_EVENT_STREAMS = 32


class EventStream(StreamingResponse):
    """Server-sent events. A stream holds its connection for as long as its reader likes, and a few hundred
    would leave none for anything else: there are `MAX_EVENT_STREAMS` at most."""

    open_now: ClassVar[int] = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        EventStream.open_now += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            EventStream.open_now -= 1


def running_jobs(daemon: Daemon) -> JobManager:
    return daemon.running_jobs


#: For endpoints that start jobs, which needs a backend.
RunningJobs = Annotated[JobManager, Depends(running_jobs)]

router = APIRouter(dependencies=[Depends(operator_only)])


@router.get("/jobs")
async def list_jobs(
    daemon: Daemon,
    limit: Annotated[int, Query(ge=1, le=MAX_JOBS_LISTED)] = 50,
    open_only: Annotated[bool, Query(alias="open")] = False,
    state: JobState | None = None,
    q: Annotated[str, Query(max_length=200)] = "",
    tag: Annotated[str, Query(max_length=40)] = "",
    before: Annotated[int | None, Query(ge=1, le=MAX_ROW)] = None,
) -> JobList:
    """List jobs, newest first, with the progress of those that a worker has. `next` is the value of `before`
    for earlier ones; null at the end."""

    def query(db: sqlite3.Connection) -> JobList:
        rows = store_jobs.newest_jobs(db, limit, JobFilter(open_only, state, q.strip(), tag), before)
        costs = GpuCosts.read(db, daemon.prices())
        shown = [views.job_summary(db, row, daemon.live(row.id), costs) for row in rows]
        return JobList(jobs=shown, next=rows[-1].id if len(rows) == limit else None)

    return await daemon.store.read(query)


@router.get("/compare")
async def compare(jobs: Annotated[str, Query(max_length=400)], daemon: Daemon) -> JobComparison:
    """Compare some jobs, by number or task id, separated by commas: curves, scores, costs, plans."""
    names = dict.fromkeys(name.strip() for name in jobs.split(",") if name.strip())
    if not 1 <= len(names) <= MOST_JOBS:
        text = f"name 1 to {MOST_JOBS} jobs, like 12,15,17"
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text)
    rows = [await daemon.store.read(store_jobs.find_job, name) for name in names]
    live = {row.id: live for row in rows if (live := daemon.live(row.id)) is not None}
    running = {row.id: found.snapshot() for row in rows if (found := daemon.figures(row.id)) is not None}

    def query(db: sqlite3.Connection) -> JobComparison:
        return compare_jobs(db, rows, GpuCosts.read(db, daemon.prices()), live, running)

    return await daemon.store.read(query)


@router.get("/jobs/{job}")
async def show_job(job: str, daemon: Daemon) -> JobDetails:
    """Show a job, by number, task id, or the beginning of a task id."""
    row = await daemon.store.read(store_jobs.find_job, job)
    figures = daemon.figures(row.id)
    running, data_dir = figures.snapshot() if figures else None, daemon.settings.data_dir

    def query(db: sqlite3.Connection) -> JobDetails:
        costs = GpuCosts.read(db, daemon.prices())
        return views.job_details(db, row, data_dir, daemon.live(row.id), running, costs)

    return await daemon.store.read(query)


@router.post("/jobs", status_code=HTTPStatus.CREATED)
async def start_job(request: Request, jobs: RunningJobs) -> StartedJob:
    """Start a task of the operator's, a task file as JSON. Only callers on this host may name local files."""
    local = is_loopback(caller_address(request))
    task = read_task_file(await request.body(), "the task", may_name_files=local)
    if task.profile is not None:
        await asyncio.to_thread(jobs.services.named_profile, task.profile)  # a mistake is told at once
    started = await jobs.start_own(task.start(jobs.services.clock()), OPERATOR)
    return StartedJob(job_id=started.job_id, task_id=task.task_id, state=started.state)


@router.post("/jobs/{job}/labels")
async def label_job(job: str, labels: JobLabels, daemon: Daemon) -> JobSummary:
    """Replace the tags and the note of a job."""
    job_id = await _job_id(daemon.store, job)
    await daemon.store.write(store_jobs.label_job, job_id, labels.tags, labels.note)
    return await _job_summary(daemon.store, await daemon.store.read(store_jobs.get_job, job_id))


@router.post("/jobs/{job}/cancel")
async def cancel_job(job: str, daemon: Daemon) -> JobSummary:
    """End a job; what is published stays."""
    return await _job_summary(daemon.store, await daemon.cancel_job(await _job_id(daemon.store, job)))


@router.post("/jobs/{job}/retry")
async def retry_job(job: str, jobs: RunningJobs) -> JobSummary:
    """Reopen a failed or cancelled job, while there is time."""
    store = jobs.services.store
    return await _job_summary(store, await jobs.retry(await _job_id(store, job)))


@router.get("/jobs/{job}/log")
async def job_log(
    job: str,
    daemon: Daemon,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    start: Annotated[str, Query(alias="from", max_length=60)] = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = 65_536,
    tail: Annotated[int | None, Query(ge=1, le=MAX_TAIL_LINES)] = None,
) -> LogChunk:
    """Read a part of an attempt's log, by default of the newest attempt: from `from` on, or its last `tail`
    lines. Continue from `next`."""
    attempts = await daemon.store.read(attempts_of, await _job_id(daemon.store, job))
    row = select_attempt(attempts, attempt)
    if tail is not None:
        return await asyncio.to_thread(last_log_lines, row, tail)
    return await asyncio.to_thread(read_log_chunk, row, start, limit)


@router.get("/events")
async def all_events(jobs: RunningJobs) -> EventStream:
    """Follow all jobs by server-sent events: `job` is a whole state, `note` one sentence, `missed` a gap."""
    return _event_stream(jobs, None)


@router.get("/jobs/{job}/events")
async def job_events(job: str, jobs: RunningJobs) -> EventStream:
    """Follow one job by server-sent events: its current state, then every change."""
    return _event_stream(jobs, await _job_id(jobs.services.store, job))


def _event_stream(jobs: JobManager, job_id: int | None) -> EventStream:
    if EventStream.open_now >= MAX_EVENT_STREAMS:
        text = f"{MAX_EVENT_STREAMS} streams of events are open already; close one"
        raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, text, {"retry-after": "5"})
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(_event_lines(jobs, job_id), media_type="text/event-stream", headers=headers)


async def _event_lines(jobs: JobManager, job_id: int | None) -> AsyncIterator[str]:
    events = jobs.services.events.listen(job_id)
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.sleep(0)  # from here on every event is received
        yield ": god-miner\n\n"
        if job_id is not None:
            yield await _current_state(jobs, job_id)
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=HEARTBEAT_SECONDS)
            if not done:
                yield ": still here\n\n"
                continue
            change = waiting.result()
            if change is None:
                return
            yield change.as_text()
            if change.kind == "missed" and job_id is not None:
                yield await _current_state(jobs, job_id)
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()


async def _current_state(jobs: JobManager, job_id: int) -> str:
    """The job's current state, also of one that is over: whoever waits for its end has to see it."""
    live = jobs.live(job_id)
    if live is None:
        row = await jobs.services.store.read(store_jobs.get_job, job_id)
        live = jobs.live(job_id) or views.idle_state(row)
    return jobs.services.events.current("job", job_id, asdict(live)).as_text()


async def _job_summary(store: Store, row: JobRow) -> JobSummary:
    return await store.read(views.job_summary, row)


async def _job_id(store: Store, word: str) -> int:
    return (await store.read(store_jobs.find_job, word)).id


# Trainings


@router.get("/jobs/{job}/series", response_model=JobSeries)
async def job_series(job: str, daemon: Daemon) -> Response:
    """Show the curves of all attempts over their steps (at most 500 points each), their results and the
    actions of rules."""
    row = await daemon.store.read(find_job, job)
    body = await daemon.store.read(views.series_json, row, _running(daemon, row))
    return Response(body, media_type="application/json")


@router.get("/jobs/{job}/plan", response_model=PlanDetails)
async def job_plan(job: str, daemon: Daemon, attempt: Annotated[int | None, Query(ge=1)] = None) -> Response:
    """Show the plan of an attempt, by default of the newest, beside what was measured."""
    row = await daemon.store.read(find_job, job)
    body = await daemon.store.read(views.plan_json, row, attempt, _running(daemon, row))
    return Response(body, media_type="application/json")


@router.get("/jobs/{job}/files")
async def job_files(job: str, daemon: Daemon) -> JobFiles:
    """List the files of the attempts and the submission, without inputs."""
    row = await daemon.store.read(find_job, job)
    folder = job_folder(daemon.settings.data_dir, row.id)
    artefacts = await asyncio.to_thread(views.files_view, folder)
    return JobFiles(job_id=row.id, artefacts=artefacts)


def _running(daemon: OperatorDaemon, row: JobRow) -> FiguresSnapshot | None:
    """On the event loop, where the worker adds to them; the rest is done in a thread."""
    figures = daemon.figures(row.id)
    return figures.snapshot() if figures else None
