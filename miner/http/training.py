"""How trainings go, on the operator's port: curves, plans and files of a job."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from miner.api.jobs import JobFiles, JobSeries, PlanDetails
from miner.http.jobs import ReadableJobs, StoredJobs
from miner.http.operator import operator_only
from miner.jobs import training_views
from miner.jobs.figures import FiguresSnapshot
from miner.jobs.folder import job_folder
from miner.store.jobs import JobRow, find_job


def build_training_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/jobs/{job}/series", job_series, methods=["GET"], response_model=JobSeries)
    router.add_api_route("/jobs/{job}/plan", job_plan, methods=["GET"], response_model=PlanDetails)
    router.add_api_route("/jobs/{job}/files", job_files, methods=["GET"])
    return router


async def job_series(job: str, daemon: ReadableJobs) -> Response:
    """Show the curves of all attempts over their steps, their results and the actions of rules."""
    row = await daemon.store.read(find_job, job)
    body = await daemon.store.read(training_views.series_json, row, _running(daemon, row))
    return Response(body, media_type="application/json")


async def job_plan(
    job: str, daemon: ReadableJobs, attempt: Annotated[int | None, Query(ge=1)] = None
) -> Response:
    """Show the plan of an attempt, by default of the newest, beside what was measured."""
    row = await daemon.store.read(find_job, job)
    body = await daemon.store.read(training_views.plan_json, row, attempt, _running(daemon, row))
    return Response(body, media_type="application/json")


async def job_files(job: str, daemon: ReadableJobs) -> JobFiles:
    """List the files of the attempts and the submission, without inputs."""
    row = await daemon.store.read(find_job, job)
    folder = job_folder(daemon.settings.data_dir, row.id)
    artefacts = await asyncio.to_thread(training_views.files_view, folder)
    return JobFiles(job_id=row.id, artefacts=artefacts)


def _running(daemon: StoredJobs, row: JobRow) -> FiguresSnapshot | None:
    """On the event loop, where the worker adds to them; the rest is done in a thread."""
    figures = daemon.figures(row.id)
    return figures.snapshot() if figures else None
