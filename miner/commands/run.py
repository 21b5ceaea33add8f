"""`god-miner run`: the daemon; with --task one task of the operator's own, looked at until it is over."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miner.commands.output import say_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings


def run(
    task: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Do one task instead, by the daemon if one runs, else by this process: a JSON file like a "
            "validator's start request; `dataset` may be a file of this machine, `model_folder` a folder.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --task: every change as a line of JSON, the job at the end.")
    ] = False,
) -> None:
    """Answer validators until a signal ends it. Settings come from the environment and .env."""
    from miner import logs
    from miner.settings import load_settings

    settings = load_settings()
    logs.configure(settings, split=task is None)
    if task is not None:
        raise typer.Exit(_one(settings, task, as_json))
    from miner.server import run as serve

    raise typer.Exit(serve(settings))


def _one(settings: Settings, file: Path, as_json: bool) -> int:
    """0 when its model is published."""
    from miner import logs
    from miner.job_display import Display
    from miner.job_view import pages
    from miner.jobs import oneoff
    from miner.jobs.tasks import read_task_file
    from miner.running import NoDaemon

    task = read_task_file(file.read_bytes(), str(file), file.absolute().parent)
    with Display(as_json=as_json) as display:
        if display.live is not None and sys.stderr.isatty():
            # The view tells what goes on; what nobody foresaw is written above it.
            logs.configure(settings, least=logging.ERROR)
        try:
            job = oneoff.by_daemon(settings, task, display.take)
        except NoDaemon:
            job = oneoff.here(settings, task, display.take)
    if as_json:
        say_json({"event": "end", **job}, line=True)
    else:
        console = terminal()
        for page in pages(job):
            console.print(page)
    return 0 if job["state"] == "done" else 1
