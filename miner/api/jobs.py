"""Jobs on the operator's port: looked at, cancelled, tried again, started, and followed as they go on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Protocol

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from miner.api.operator import caller_of, operator_only
from miner.jobs import shown
from miner.jobs.book import JobBook
from miner.jobs.live import Live
from miner.jobs.logs import attempt_of, read_piece
from miner.jobs.manager import Jobs
from miner.jobs.tasks import OPERATOR, read_task_file
from miner.settings import Settings
from miner.settings.values import is_loopback
from miner.store import work
from miner.store.work import JobRow

#: Without a line now and then a proxy, or a laptop that slept, would hold a dead stream for ever.
HEARTBEAT_SECONDS = 15.0
MOST_LISTED = 1000
MOST_LOG = 1 << 20
MOST_STREAMS = 32


class Daemon(Protocol):
    """What can be read of jobs, also while there is no engine."""

    @property
    def book(self) -> JobBook: ...

    @property
    def settings(self) -> Settings: ...

    def live(self, job_id: int) -> Live | None: ...


class EventStream(StreamingResponse):
    """Server-sent events. A stream holds its connection for as long as its reader likes, so that a few
    hundred would leave none for anything else: there are `MOST_STREAMS` at most."""

    open_now: ClassVar[int] = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        EventStream.open_now += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            EventStream.open_now -= 1


def jobs_of(request: Request) -> Jobs:
    jobs: Jobs = request.app.state.daemon.running_jobs
    return jobs


def daemon_of(request: Request) -> Daemon:
    daemon: Daemon = request.app.state.daemon
    return daemon


#: For what changes jobs, which takes an engine.
TheJobs = Annotated[Jobs, Depends(jobs_of)]
#: For what only reads of them.
TheDaemon = Annotated[Daemon, Depends(daemon_of)]


def build_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/jobs", list_jobs, methods=["GET"])
    router.add_api_route("/jobs", start_job, methods=["POST"], status_code=HTTPStatus.CREATED)
    router.add_api_route("/jobs/{job}", show_job, methods=["GET"])
    router.add_api_route("/jobs/{job}/cancel", cancel_job, methods=["POST"])
    router.add_api_route("/jobs/{job}/retry", retry_job, methods=["POST"])
    router.add_api_route("/jobs/{job}/log", job_log, methods=["GET"])
    router.add_api_route("/jobs/{job}/events", job_events, methods=["GET"])
    router.add_api_route("/events", events, methods=["GET"])
    return router


async def list_jobs(
    daemon: TheDaemon,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50,
    open_only: Annotated[bool, Query(alias="open")] = False,
) -> dict[str, Any]:
    """The newest first, with what is going on in those that are worked on."""

    def query(db: sqlite3.Connection) -> list[dict[str, Any]]:
        rows = work.newest_jobs(db, limit, only_open=open_only)
        return [shown.line(db, row, daemon.live(row.id)) for row in rows]

    return {"jobs": await daemon.book.read(query)}


async def show_job(job: str, daemon: TheDaemon) -> dict[str, Any]:
    """By number, by task id, or by the beginning of one."""

    def query(db: sqlite3.Connection) -> dict[str, Any]:
        row = work.find_job(db, job)
        return shown.whole(db, row, daemon.settings.data_dir, daemon.live(row.id))

    return await daemon.book.read(query)


async def start_job(request: Request, jobs: TheJobs) -> dict[str, Any]:
    """A one-off task of the operator's."""
    local = is_loopback(caller_of(request))
    task = read_task_file(await request.body(), "the task", may_name_files=local)
    started = await jobs.take(task.start(jobs.parts.clock()), OPERATOR)
    return {"job_id": started.job_id, "task_id": task.task_id, "state": started.state}


async def cancel_job(job: str, jobs: TheJobs) -> dict[str, Any]:
    """End it; what is published stays."""
    return await _line(jobs, await jobs.cancel(await _id_of(jobs.parts.book, job)))


async def retry_job(job: str, jobs: TheJobs) -> dict[str, Any]:
    """Another life for a failed or cancelled job, while there is time."""
    return await _line(jobs, await jobs.retry(await _id_of(jobs.parts.book, job)))


async def job_log(
    job: str,
    daemon: TheDaemon,
    attempt: Annotated[int | None, Query(ge=1)] = None,
    start: Annotated[str, Query(alias="from", max_length=60)] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_LOG)] = 65_536,
) -> dict[str, Any]:
    """A part of an attempt's log, the newest one's unless said otherwise; go on from `next`."""
    attempts = await daemon.book.attempts(await _id_of(daemon.book, job))
    piece = await asyncio.to_thread(read_piece, attempt_of(attempts, attempt), start, limit)
    return piece.as_dict()


async def events(jobs: TheJobs) -> EventStream:
    """Server-sent events of all jobs, from now on."""
    return _stream(jobs, None)


async def job_events(job: str, jobs: TheJobs) -> EventStream:
    """Server-sent events of one job: how it is now, then every change."""
    return _stream(jobs, await _id_of(jobs.parts.book, job))


def _stream(jobs: Jobs, job_id: int | None) -> EventStream:
    if EventStream.open_now >= MOST_STREAMS:
        text = f"{MOST_STREAMS} streams of events are open already; close one"
        raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, text, {"retry-after": "5"})
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(_told(jobs, job_id), media_type="text/event-stream", headers=headers)


async def _told(jobs: Jobs, job_id: int | None) -> AsyncIterator[str]:
    listening = jobs.parts.bus.listen(job_id)
    waiting = asyncio.ensure_future(anext(listening, None))
    try:
        await asyncio.sleep(0)  # from here on it is listened
        yield ": god-miner\n\n"
        if job_id is not None:
            yield await _picture(jobs, job_id)
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
                yield await _picture(jobs, job_id)
            waiting = asyncio.ensure_future(anext(listening, None))
    finally:
        waiting.cancel()


async def _picture(jobs: Jobs, job_id: int) -> str:
    """How the job is now, also one that nobody works on any more: whoever waits for its end has to see it."""
    live = jobs.live(job_id)
    if live is None:
        row = await jobs.parts.book.load(job_id)
        live = jobs.live(job_id) or Live.of(row)
    return jobs.parts.bus.now("job", job_id, live.as_dict()).as_text()


async def _line(jobs: Jobs, row: JobRow) -> dict[str, Any]:
    return await jobs.parts.book.read(lambda db: shown.line(db, row))


async def _id_of(book: JobBook, word: str) -> int:
    return (await book.read(lambda db: work.find_job(db, word))).id
