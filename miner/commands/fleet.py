"""`god-miner fleet`: the cards of this host, who has them until when, and who waits."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import ConfigError, GodMinerError
from miner.commands.output import say_error, say_json, terminal

if TYPE_CHECKING:
    from miner.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The GPUs of this host and who has them.")

AsJson = Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")]


@app.callback()
def fleet() -> None:
    """The GPUs of this host and who has them."""


@app.command()
def show(as_json: AsJson = False) -> None:
    """Show cards, health, holders, windows and queue. Without a daemon: the cards, and what is promised."""
    from miner.running import NoDaemon, ask
    from miner.settings import load_settings

    try:
        settings = load_settings()
        try:
            page = {"daemon": True, **ask(settings, "/fleet")}
        except NoDaemon as missing:
            page = {"daemon": False, "why": str(missing), **_without_daemon(settings)}
    except GodMinerError as error:
        _fail(error, as_json)
    if as_json:
        say_json(page)
    else:
        _print(page)
    usable = any(card["out"] is None for card in page["cards"])
    raise typer.Exit(0 if usable and page["trouble"] is None else 1)


def _without_daemon(settings: Settings) -> dict[str, Any]:
    from miner.fleet.build import look_once
    from miner.fleet.show import books_page
    from miner.store import database
    from miner.store.books import Books

    seen, source = look_once(settings)
    path = settings.data_dir / database.FILE_NAME
    taken = Books(path).taken() if database.schema_version(path) == database.HEAD else []
    return books_page(seen.stock, source, taken, time.time())


def _fail(error: GodMinerError, as_json: bool) -> None:
    say_error(error, as_json=as_json)
    raise typer.Exit(os.EX_CONFIG if isinstance(error, ConfigError) else 1)


def _print(page: dict[str, Any]) -> None:
    console = terminal()
    if not page["daemon"]:
        console.print(page["why"], style="yellow", soft_wrap=True)
    if page["trouble"]:
        console.print(page["trouble"], style="red", soft_wrap=True)
    console.print(_cards(page))
    if page["claims"]:
        console.print(_claims(page))
    else:
        console.print("nothing is promised, nobody waits", style="dim")


def _cards(page: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(
        "card", "id", "kind", "memory", "linked to", "state", title=page["source"] or None, box=None
    )
    for card in page["cards"]:
        state, style = _state(card)
        linked = ", ".join(map(str, card["linked"])) or "-"
        table.add_row(
            str(card["index"]), card["id"], card["kind"], card["memory"], linked, state, style=style
        )
    return table


def _state(card: dict[str, Any]) -> tuple[str, str]:
    if card["out"] is not None:
        return f"out: {card['out']}", "red"
    if card["task_id"] is not None:
        return f"runs {card['task_id']}", ""
    if card["unclean"]:
        return "not empty yet after its last job", "yellow"
    return ("free, and used a little by somebody else" if card["shared"] else "free"), "green"


def _claims(page: dict[str, Any]) -> Any:
    from rich.table import Table

    index = {card["id"]: str(card["index"]) for card in page["cards"]}
    table = Table("task", "stage", "cards", "from (UTC)", "until", "value per GPU-hour", box=None)
    for claim in page["claims"]:
        stage = f"{claim['kind']}, {claim['stage']}"
        if claim["queue"] is not None:
            stage += f", {claim['queue']}. in the queue"
        cards = ", ".join(index.get(gpu, gpu) for gpu in claim["gpus"])
        begins = _moment(claim["starts_at"]) if claim["gpus"] else "no place yet"
        value = f"{claim['priority']:.3f}" if claim["accepted"] else "not accepted"
        table.add_row(claim["task_id"], stage, cards or "-", begins, _moment(claim["ends_at"]), value)
    return table


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M")
