"""`god-miner jobs`: what is trained, how it goes on, and what an operator may do about it."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.commands import completion
from miner.commands.output import say, say_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings
    from miner.store.work import AttemptRow

app = typer.Typer(no_args_is_help=True, help="Jobs: list, look, follow, cancel, try again.")

Which = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="A job's number, or its task's id or beginning.",
        autocompletion=completion.jobs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Number = Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt. Default: the newest.")]
#: Between two looks at a log that grows.
_LOOK_SECONDS = 0.3


@app.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="At most so many.")] = 20,
    open_only: Annotated[bool, typer.Option("--open", help="Only those that are not over.")] = False,
    as_json: AsJson = False,
) -> None:
    """The newest jobs: what they do at the moment, how they ended, what is published."""
    from miner.job_view import listed
    from miner.jobs import shown
    from miner.running import NoDaemon, ask
    from miner.store import work

    settings = _settings()
    try:
        query = f"?limit={limit}" + ("&open=true" if open_only else "")
        found = ask(settings, f"/jobs{query}")["jobs"]
    except NoDaemon:
        found = _read(
            settings,
            lambda db: [shown.line(db, row) for row in work.newest_jobs(db, limit, only_open=open_only)],
        )
    if as_json:
        say_json(found)
    else:
        console = terminal()
        console.print(listed(found, console.width))


@app.command()
def show(which: Which, as_json: AsJson = False) -> None:
    """Everything of a job: its attempts, its steps, why it ended, and what the validator sees of it."""
    from miner.job_view import pages

    found = _job(_settings(), which)
    if as_json:
        say_json(found)
        return
    console = terminal()
    for page in pages(found):
        console.print(page)


@app.command()
def logs(
    which: Which,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    attempt: Number = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="From the end.")] = 50,
    as_json: AsJson = False,
) -> None:
    """What a job's training writes."""
    from miner.jobs.logs import attempt_of, last_lines, read_piece

    settings = _settings()
    row = attempt_of(_attempts(settings, which), attempt)
    piece = last_lines(row, lines)
    while True:
        if as_json and (piece.text or not follow):
            say_json(piece.as_dict(), line=True)
        elif not as_json:
            typer.echo(piece.text, nl=False)  # cleaned where it was read
        if not follow:
            return
        time.sleep(_LOOK_SECONDS)
        piece = read_piece(row, piece.next, 1 << 16)
        if piece.text:
            continue
        attempts = _attempts(settings, which)
        newest = attempt_of(attempts, attempt)
        if newest.number != row.number:
            row, piece = newest, read_piece(newest, "", 1 << 16)
        elif newest.ended_at is not None and (row := newest) and _is_over(settings, which):
            return


@app.command()
def cancel(which: Which, as_json: AsJson = False) -> None:
    """End a job. What is published of it stays."""
    _say(_change(which, "cancel"), as_json)


@app.command()
def retry(which: Which, as_json: AsJson = False) -> None:
    """Another try for a job that failed or was cancelled, while there is time."""
    _say(_change(which, "retry"), as_json)


@app.command()
def replay(which: Which, attempt: Number = None, as_json: AsJson = False) -> None:
    """Print how to run an attempt by hand, in a folder of its own."""
    from miner.jobs.launch import Attempt
    from miner.jobs.logs import attempt_of
    from miner.jobs.replay import Replay

    settings = _settings()
    row = attempt_of(_attempts(settings, which), attempt)
    found = Replay.of(Attempt.load(row), settings)
    if as_json:
        say_json(found.as_dict())
    else:
        say(found.script())


def _change(which: str, what: str) -> dict[str, Any]:
    """By the daemon: it owns the books and the trainings."""
    from miner.running import tell

    settings = _settings()
    return tell(settings, f"/jobs/{_id_of(settings, which)}/{what}")


def _say(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say_json(job)
    else:
        say(f"job {job['id']} ({job['task_id']}) is {job['state']}")


def _job(settings: Settings, which: str) -> dict[str, Any]:
    from miner.jobs import shown
    from miner.running import NoDaemon, ask
    from miner.store import work

    job_id = _id_of(settings, which)
    try:
        found = ask(settings, f"/jobs/{job_id}")
    except NoDaemon:
        found = _read(settings, lambda db: shown.whole(db, work.job(db, job_id), settings.data_dir))
    return found


def _id_of(settings: Settings, which: str) -> int:
    from miner.store import work

    found: int = _read(settings, lambda db: work.find_job(db, which).id)
    return found


def _is_over(settings: Settings, which: str) -> bool:
    from miner.store import work

    return bool(_read(settings, lambda db: work.find_job(db, which).state.is_over))


def _attempts(settings: Settings, which: str) -> list[AttemptRow]:
    from miner.store import work

    def query(db: sqlite3.Connection) -> list[AttemptRow]:
        return work.attempts(db, work.find_job(db, which).id)

    found: list[AttemptRow] = _read(settings, query)
    return found


def _read(settings: Settings, query: Any) -> Any:
    from miner.offers.reading import reading

    with reading(settings.data_dir) as connection:
        return query(connection)


def _settings() -> Settings:
    from miner.settings import load_settings

    return load_settings()
