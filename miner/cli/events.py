"""`god-miner events`: the log of events, alerts included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.cli.options import Limit, Since, load_settings, parse_time
from miner.cli.output import echo_json, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from miner.store.events import EventRow

_POLL_SECONDS = 0.5


def events(
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", help="Kind of event: job_failed, gpu_* (repeatable). Default: all."),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Job: its number, or the beginning of its task's id. Default: all.")
    ] = None,
    alerts: Annotated[bool, typer.Option("--alerts", help="Show alerts only.")] = False,
    since: Since = None,
    limit: Limit = 50,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new events until interrupted.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --follow one object per line.")
    ] = False,
) -> None:
    """Show events, oldest first: jobs, attempts, lapsed offers, alerts. Times are UTC."""
    from miner.store import events as store_events
    from miner.store import jobs as store_jobs
    from miner.store.database import open_store

    store_dir = load_settings().store_dir
    start = 0.0 if since is None else parse_time(since, time.time())
    with open_store(store_dir) as connection:
        row = None if job is None else store_jobs.find_job(connection, job)
    wanted = store_events.EventFilter(start, kinds or (), row, alerts)

    def look(after: int) -> list[EventRow]:
        with open_store(store_dir) as connection:
            return store_events.list_events(connection, wanted, after=after, limit=10_000 if after else limit)

    if as_json and not follow:
        echo_json([one.as_dict() for one in look(0)])
        return
    console = None if as_json else terminal()
    for one in follow_events(look, time.sleep) if follow else look(0):
        if console is None:
            echo_json(one.as_dict(), line=True)
        else:
            console.print(_event_row(one))


def follow_events(look: Callable[[int], list[EventRow]], wait: Callable[[float], Any]) -> Iterator[EventRow]:
    """Print stored events, then new ones as they happen."""
    last = 0
    while True:
        found = look(last)
        yield from found
        last = found[-1].id if found else last
        wait(_POLL_SECONDS)


def _event_row(event: EventRow) -> Table:
    from rich.table import Table

    from miner.cli.output import show_time

    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(min_width=20, no_wrap=True)
    table.add_column(overflow="fold")
    alert = bool(event.data.get("alert"))
    words = ": ".join(word for word in ("ALERT" if alert else "", event.about, event.text) if word)
    table.add_row(show_time(event.at), event.kind, words, style="yellow" if alert else "")
    return table
