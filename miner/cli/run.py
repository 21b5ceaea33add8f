"""`god-miner run`: the daemon, or with --task one task of the operator's own, followed to its end.
`god-miner dashboard`: the operator's page.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli.options import load_settings
from miner.cli.output import echo_json, print_pages

if TYPE_CHECKING:
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
        raise typer.Exit(_run_task(settings, task, as_json))
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


def _run_task(settings: Settings, file: Path, as_json: bool) -> int:
    """Run one task; return 0 if its model is published."""
    from core.domain.job_states import JobState
    from miner.cli import one_task
    from miner.cli.render.jobs import JobDisplay, job_pages
    from miner.daemon_client import NoDaemon
    from miner.jobs.tasks import read_task_file
    from miner.observe import logs

    task = read_task_file(file.read_bytes(), str(file), file.absolute().parent)
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
    return 0 if job.state is JobState.DONE else 1
