"""`god-miner run`: the daemon, or with --task one task of the operator's own, followed to its end.
`god-miner dashboard`: the operator's page.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli import options
from miner.cli.options import load_settings
from miner.cli.output import echo_json, print_pages, terminal

if TYPE_CHECKING:
    from miner.api.jobs import JobDetails
    from miner.jobs.tasks import TaskFile
    from miner.settings import Settings


def run(
    task: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON file of one task to run instead, in the daemon if one runs, otherwise here. It is "
            "written like a validator's start request; `dataset` may be a local file, `model_folder` "
            "a directory.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="Profile for --task, instead of the one in force. Several: one training after the other, "
            "then a comparison.",
            autocompletion=options.complete_profiles,
        ),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the job, with --task (repeatable).")] = None,
    note: Annotated[str | None, typer.Option(help="Note on the job, with --task.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print every change as a line of JSON, the job at the end; with --task."),
    ] = False,
) -> None:
    """Answer validators until a signal ends it. Settings come from the environment and .env."""
    from miner.observe import logs

    settings = load_settings()
    logs.configure(settings, split=task is None)
    for warning in settings.warnings:
        logging.getLogger(__name__).warning(warning)
    if task is not None:
        raise typer.Exit(_run_tasks(settings, _tasks(settings, task, profile, tag, note), as_json))
    if profile or tag or note:
        raise typer.BadParameter("--profile, --tag and --note go with --task; the daemon has PROFILE")
    from miner.server import run_daemon as serve

    raise typer.Exit(serve(settings))


def dashboard() -> None:
    """Serve the operator's page until a signal ends it: on http://127.0.0.1:7997, for the daemon of this
    machine or those of DASHBOARD_DAEMONS. It is a process of its own and needs no daemon to start."""
    from miner.observe import logs

    settings = load_settings()
    logs.configure(settings)
    from miner.dashboard.server import serve_dashboard

    serve_dashboard(settings)


def _tasks(
    settings: Settings, file: Path, profiles: list[str] | None, tags: list[str] | None, note: str | None
) -> list[TaskFile]:
    """Read the task, once for each profile."""
    from core.profile.resolve import load_profile
    from miner.jobs.tasks import checked_labels, read_task_file

    task = read_task_file(file.read_bytes(), str(file), file.absolute().parent)
    labels = checked_labels([*task.tags, *(tags or ())], task.note if note is None else note)
    task = task.model_copy(update={"tags": tuple(labels.tags), "note": labels.note})
    found = []
    for number, name in enumerate(profiles or [task.profile], 1):
        if name is not None:
            loaded = load_profile(name, [settings.profile_dir])
            name = str(Path(name).resolve()) if name != loaded.name else name
        several = {"task_id": f"{task.task_id}-{number}"} if len(profiles or ()) > 1 else {}
        if several and task.expected_repo_name:
            several["expected_repo_name"] = f"{task.expected_repo_name}-{number}"
        found.append(task.model_copy(update={"profile": name, **several}))
    return found


def _run_tasks(settings: Settings, tasks: Sequence[TaskFile], as_json: bool) -> int:
    """Run tasks one after the other, and compare several; return 0 if all their models are published."""
    from core.domain.job_states import JobState
    from miner.cli.jobs import compared_jobs
    from miner.cli.render.jobs import comparison_pages

    jobs = []
    for task in tasks:
        jobs.append(_run_task(settings, task, as_json))
        if jobs[-1].state is JobState.CANCELLED:
            break
    if len(jobs) > 1:
        comparison = compared_jobs(settings, [str(job.id) for job in jobs])
        if as_json:
            echo_json({"event": "comparison", **comparison.model_dump(mode="json")}, line=True)
        else:
            print_pages(comparison_pages(comparison, terminal().width))
    return 0 if all(job.state is JobState.DONE for job in jobs) else 1


def _run_task(settings: Settings, task: TaskFile, as_json: bool) -> JobDetails:
    """Run one task, and return its job as it ended."""
    from miner.cli import one_task
    from miner.cli.render.jobs import JobDisplay, job_pages
    from miner.daemon_client import NoDaemon
    from miner.observe import logs

    with JobDisplay(as_json=as_json) as display:
        if display.live is not None and sys.stderr.isatty():
            # The display shows progress; unexpected log lines are printed above it.
            logs.configure(settings, least=logging.ERROR)
        try:
            job = one_task.run_in_daemon(settings, task, display.take)
        except NoDaemon:
            job = one_task.run_here(settings, task, display.take)
    if as_json:
        echo_json({"event": "end", **job.model_dump(mode="json")}, line=True)
    else:
        print_pages(job_pages(job))
    return job
