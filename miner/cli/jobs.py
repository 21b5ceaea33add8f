"""`god-miner jobs`: list, show, follow, cancel and retry jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from core.domain.job_states import JobState
from miner.cli import options
from miner.cli.options import AsJson, PageLimit, load_settings
from miner.cli.output import echo, echo_json, print_pages, terminal

if TYPE_CHECKING:
    import sqlite3
    from contextlib import AbstractContextManager

    from miner.api.comparison import JobComparison
    from miner.api.jobs import JobDetails, JobSummary
    from miner.settings import Settings
    from miner.store.attempts import AttemptRow

app = typer.Typer(no_args_is_help=True, help="List, show, compare, tag, follow, cancel and retry jobs.")

Which = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Number of a job, or the beginning of its task's id.",
        autocompletion=options.complete_jobs,
    ),
]
Number = Annotated[
    int | None, typer.Option("--attempt", min=1, help="Number of the attempt. Default: the newest.")
]
#: Pause between two reads of a growing log.
_POLL_SECONDS = 0.3


@app.command("list")
def list_jobs(
    limit: PageLimit = 20,
    open_only: Annotated[bool, typer.Option("--open", help="Show open jobs only.")] = False,
    state: Annotated[JobState | None, typer.Option(help="Show jobs in this state only.")] = None,
    search: Annotated[
        str, typer.Option("-s", "--search", help="Part of the model's name, the task's id or the note.")
    ] = "",
    tag: Annotated[str, typer.Option(help="Show jobs with this tag only.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the newest jobs: state, progress or end, publication, cost."""
    from miner.api.jobs import JobList
    from miner.cli.render.jobs import job_table
    from miner.daemon_client import NoDaemon, get
    from miner.fleet.costs import GpuCosts
    from miner.fleet.fleet_file import gpu_prices
    from miner.jobs.views import job_summary
    from miner.store.jobs import JobFilter, newest_jobs

    settings = load_settings()
    try:
        asked = {"limit": limit, "open": open_only or None, "state": state, "q": search, "tag": tag}
        query = urlencode({name: value for name, value in asked.items() if value})
        jobs = get(settings, f"/jobs?{query}", JobList).jobs
    except NoDaemon:
        with _store(settings) as db:
            costs = GpuCosts.read(db, gpu_prices(settings))
            rows = newest_jobs(db, limit, JobFilter(open_only, state, search, tag))
            jobs = [job_summary(db, row, costs=costs) for row in rows]
    if as_json:
        echo_json(jobs)
    else:
        console = terminal()
        console.print(job_table(jobs, console.width))


@app.command()
def show(which: Which, as_json: AsJson = False) -> None:
    """Show a job: attempts, steps, why it ended, what rules did to it, and what the validator sees."""
    from miner.cli.render.jobs import job_pages

    job = _job(load_settings(), which)
    if as_json:
        echo_json(job)
        return
    print_pages(job_pages(job))


@app.command()
def compare(
    which: Annotated[
        list[str],
        typer.Argument(metavar="ID ID…", help="Jobs to compare.", autocompletion=options.complete_jobs),
    ],
    as_json: AsJson = False,
) -> None:
    """Put jobs side by side: curves, scores, speed, cost, and the values in which their plans differ."""
    from miner.cli.render.jobs import comparison_pages

    comparison = compared_jobs(load_settings(), which)
    if as_json:
        echo_json(comparison)
    else:
        print_pages(comparison_pages(comparison, terminal().width))


@app.command()
def tag(
    which: Which,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A tag to remove (repeatable).")] = None,
    note: Annotated[str | None, typer.Option(help="The job's note, instead of the one it has.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tag a job, or write a note on it. The daemon does it, where one runs."""
    from miner.api.jobs import JobLabels, JobSummary
    from miner.daemon_client import NoDaemon, post
    from miner.jobs.tasks import checked_labels
    from miner.jobs.views import job_summary
    from miner.store.database import FILE_NAME, DataDirLock, connect
    from miner.store.jobs import get_job, label_job

    settings = load_settings()
    before = _job(settings, which)
    kept = {*before.tags, *(tags or ())} - {*(remove or ())}
    labels: JobLabels = checked_labels(sorted(kept), before.note if note is None else note)
    try:
        job = post(settings, f"/jobs/{before.id}/labels", JobSummary, labels)
    except NoDaemon:
        lock = DataDirLock(settings.data_dir, settings.store_dir)
        lock.acquire()
        try:
            with closing(connect(settings.store_dir / FILE_NAME)) as db:
                label_job(db, before.id, labels.tags, labels.note)
                job = job_summary(db, get_job(db, before.id))
        finally:
            lock.release()
    if as_json:
        echo_json(job)
    else:
        echo(f"job {job.id}: {', '.join(job.tags) or 'no tags'}" + (f"; {job.note}" if job.note else ""))


@app.command()
def stats(
    days: Annotated[float, typer.Option(min=0.01, help="Count jobs that ended in the last days.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show success, mean completion time and gain over the base, by task type, family and model size."""
    from miner.api.reports import JobStatistics
    from miner.cli.render.jobs import success_tables
    from miner.cli.report import policy_in_force
    from miner.reports.ended_jobs import ended_jobs, success_by, success_of

    settings, now = load_settings(), time.time()
    here = options.local_hardware(settings) if settings.policy == "auto" else None
    sizes = policy_in_force(settings, here).terms.success.size
    with _store(settings) as db:
        jobs = ended_jobs(db, now - days * 86_400, now)
    statistics = JobStatistics(days=days, all=success_of(jobs), **dict(success_by(jobs, sizes)))
    if as_json:
        echo_json(statistics)
    else:
        print_pages(success_tables(statistics))


@app.command()
def logs(
    which: Which,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the job ends.")] = False,
    attempt: Number = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines from the end.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Print the log of a job's training."""
    from miner.jobs.views import last_log_lines, read_log_chunk, select_attempt

    settings = load_settings()
    row = select_attempt(_attempts(settings, which), attempt)
    piece = last_log_lines(row, lines)
    while True:
        if as_json and (piece.text or not follow):
            echo_json(piece, line=True)
        elif not as_json:
            typer.echo(piece.text, nl=False)  # control characters were removed when it was read
        if not follow:
            return
        time.sleep(_POLL_SECONDS)
        piece = read_log_chunk(row, piece.next, 1 << 16)
        if piece.text:
            continue
        attempts = _attempts(settings, which)
        newest = select_attempt(attempts, attempt)
        if newest.number != row.number:
            row, piece = newest, read_log_chunk(newest, "", 1 << 16)
        elif newest.ended_at is not None and (row := newest) and _is_over(settings, which):
            return


@app.command()
def cancel(which: Which, as_json: AsJson = False) -> None:
    """Cancel a job. Its published model stays."""
    _echo_job(_ask_daemon_to(which, "cancel"), as_json)


@app.command()
def retry(which: Which, as_json: AsJson = False) -> None:
    """Run a failed or cancelled job again, while there is time."""
    _echo_job(_ask_daemon_to(which, "retry"), as_json)


@app.command()
def replay(which: Which, attempt: Number = None, as_json: AsJson = False) -> None:
    """Print how to run an attempt by hand, in a directory of its own."""
    from miner.jobs.launch import AttemptReplay, JobAttempt
    from miner.jobs.views import select_attempt
    from miner.store.jobs import NoSuchJob

    settings = load_settings()
    row = select_attempt(_attempts(settings, which), attempt)
    try:
        found = AttemptReplay.from_attempt(JobAttempt.load(row), settings)
    except (OSError, ValueError) as error:
        raise NoSuchJob(f"attempt {row.number} of job {row.job_id} cannot be replayed: {error}") from None
    if as_json:
        echo_json(found.as_dict())
    else:
        echo(found.script())


def _ask_daemon_to(which: str, what: str) -> JobSummary:
    """Have the daemon do it: it owns the store and the trainings."""
    from miner.api.jobs import JobSummary
    from miner.daemon_client import post

    settings = load_settings()
    return post(settings, f"/jobs/{_id_of(settings, which)}/{what}", JobSummary)


def _echo_job(job: JobSummary, as_json: bool) -> None:
    if as_json:
        echo_json(job)
    else:
        echo(f"job {job.id} ({job.task_id}) is {job.state}")


def compared_jobs(settings: Settings, which: Sequence[str]) -> JobComparison:
    """Ask the daemon for the comparison, or read the store."""
    from miner.api.comparison import JobComparison
    from miner.daemon_client import NoDaemon, get
    from miner.fleet.costs import GpuCosts
    from miner.fleet.fleet_file import gpu_prices
    from miner.jobs.comparison import MOST_JOBS, compare_jobs
    from miner.store.jobs import find_job

    if len(which) > MOST_JOBS:
        raise typer.BadParameter(f"{MOST_JOBS} jobs can be compared at once")
    try:
        return get(settings, f"/compare?{urlencode({'jobs': ','.join(which)})}", JobComparison)
    except NoDaemon:
        with _store(settings) as db:
            rows = [find_job(db, name) for name in dict.fromkeys(which)]
            return compare_jobs(db, rows, GpuCosts.read(db, gpu_prices(settings)), {}, {})


def _job(settings: Settings, which: str) -> JobDetails:
    from miner.api.jobs import JobDetails
    from miner.daemon_client import NoDaemon, get
    from miner.fleet.costs import GpuCosts
    from miner.fleet.fleet_file import gpu_prices
    from miner.jobs.views import job_details
    from miner.store.jobs import get_job

    job_id = _id_of(settings, which)
    try:
        return get(settings, f"/jobs/{job_id}", JobDetails)
    except NoDaemon:
        with _store(settings) as db:
            costs = GpuCosts.read(db, gpu_prices(settings))
            return job_details(db, get_job(db, job_id), settings.data_dir, costs=costs)


def _id_of(settings: Settings, which: str) -> int:
    from miner.store.jobs import find_job

    with _store(settings) as db:
        return find_job(db, which).id


def _is_over(settings: Settings, which: str) -> bool:
    from miner.store.jobs import find_job

    with _store(settings) as db:
        return find_job(db, which).state.is_over


def _attempts(settings: Settings, which: str) -> list[AttemptRow]:
    from miner.store.attempts import attempts_of
    from miner.store.jobs import find_job

    with _store(settings) as db:
        return attempts_of(db, find_job(db, which).id)


def _store(settings: Settings) -> AbstractContextManager[sqlite3.Connection]:
    from miner.store.database import open_store

    return open_store(settings.store_dir)
