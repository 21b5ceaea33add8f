"""`god-miner offers`: which offers came, what was answered, and why."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from miner.offers.reading import StoredOffer

app = typer.Typer(help="Offers that came, what was answered, and why.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(help="An offer's number in the list, or its task's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_offers(
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 2d, 12h, or a date like 2025-10-01.")
    ] = None,
    accepted: Annotated[
        bool | None, typer.Option("--accepted/--refused", help="Only those; unset: both.")
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="The newest so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The offers that came, oldest first, with their answers and what became of them."""
    from miner.commands.moments import moment
    from miner.offers.reading import reading, stored_offers
    from miner.settings import load_settings

    start = 0.0 if since is None else moment(since, time.time())
    with reading(load_settings().data_dir) as connection:
        found = stored_offers(connection, since=start, accepted=accepted, most=most)
    if as_json:
        typer.echo(json.dumps([_brief(one) for one in found], indent=2))
        return
    _print_list(found)


@app.command()
def show(which: Which, as_json: AsJson = False) -> None:
    """One offer as it came, what was answered to it, and what became of it."""
    one = _stored(which)
    if as_json:
        typer.echo(json.dumps(_brief(one), indent=2))
        return
    for name, value in _brief(one).items():
        typer.echo(f"{name.replace('_', ' '):14} {'–' if value is None else value}")


@app.command()
def explain(which: Which, as_json: AsJson = False) -> None:
    """Why an offer was accepted or refused: every rule, every factor, and what would have to change."""
    from rich.console import Console

    from miner.decision_view import as_data, heading, pages

    one = _stored(which)
    if as_json:
        typer.echo(json.dumps(as_data(one.offer, one.decision), indent=2))
        return
    console = Console(markup=False, highlight=False)
    what = f"start without an accepted offer (job {one.number})" if one.is_start else f"offer {one.number}"
    console.print(f"{what}, {_when(one.received_at)} UTC, from {one.validator}: {one.known.value}")
    console.print(f"{heading(one.offer)}\n")
    for page in pages(one.offer, one.decision):
        console.print(page)


def _stored(which: str) -> StoredOffer:
    from miner.offers.reading import reading, stored_offer
    from miner.settings import load_settings

    with reading(load_settings().data_dir) as connection:
        return stored_offer(connection, which)


def _brief(one: StoredOffer) -> dict[str, Any]:
    decision = one.decision
    failed = [reason.text for reason in decision.failed]
    return {
        "id": None if one.is_start else one.number,
        "received_at": _when(one.received_at),
        "decided_at": _when(one.decided_at),
        "validator": one.validator,
        "task_id": one.offer.task_id,
        "task_type": one.offer.task_type.value,
        "model": one.offer.model,
        "params": one.offer.model_params_count,
        "hours": one.offer.hours_to_complete,
        "ds_size": one.offer.ds_size,
        "times_seen": one.times_seen,
        "accepted": decision.accepted,
        "message": decision.message,
        "score": decision.score,
        "points": decision.value.points if decision.value else None,
        "why": "; ".join(failed) or None,
        "became": one.known.value,
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
    }


def _print_list(found: list[StoredOffer]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("id", "came (UTC)", "task", "model", "hours", "answer", "score", "because of", "became"):
        table.add_column(name, overflow="fold", justify="right" if name in ("id", "hours") else "left")
    for one in found:
        decision = one.decision
        table.add_row(
            str(one.number),
            _when(one.received_at),
            one.offer.task_type.value,
            one.offer.model,
            f"{one.offer.hours_to_complete:g}",
            "accepted" if decision.accepted else "refused",
            "" if decision.score is None else f"{decision.score:.3f}",
            decision.failed[0].text if decision.failed else "",
            one.known.value,
        )
    Console(markup=False, highlight=False).print(table)


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
