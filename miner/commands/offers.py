"""`god-miner offers`: which offers came, what was answered, and why."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miner.commands.output import say, say_json, terminal

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
        say_json([_brief(one) for one in found])
        return
    _print_list(found)


@app.command()
def show(which: Which, as_json: AsJson = False) -> None:
    """One offer as it came, what was answered to it, and what became of it."""
    one = _stored(which)
    if as_json:
        say_json(_brief(one))
        return
    for name, value in _brief(one).items():
        if name.endswith("_at"):
            value = f"{_when(value)} UTC"
        say(f"{name.replace('_', ' '):14} {'–' if value is None else value}")


@app.command()
def explain(which: Which, as_json: AsJson = False) -> None:
    """Why an offer was accepted or refused: every rule, every factor, and what would have to change."""
    from miner.decision_view import as_data, heading, pages

    one = _stored(which)
    if as_json:
        say_json(as_data(one.offer, one.decision))
        return
    console = terminal()
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
        "received_at": one.received_at,
        "decided_at": one.decided_at,
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
    from miner.job_view import WIDE, cells, one_line_table

    console = terminal()
    names = ["id", "came", "type", "model", "hours", "answer", "outcome"]
    names += ["score", "why"] if console.width >= WIDE else []
    table = one_line_table(*names, cut=("model", "why"), right=("id", "hours"))
    for one in found:
        decision = one.decision
        row = {
            "id": str(one.number),
            "came": _when(one.received_at)[5:-3],
            "type": one.offer.task_type.value.removesuffix("Task").removesuffix("Text"),
            "model": one.offer.model,
            "hours": f"{one.offer.hours_to_complete:g}",
            "answer": "accepted" if decision.accepted else "refused",
            "score": "" if decision.score is None else f"{decision.score:.3f}",
            # What became of it, or the rule that it failed.
            "outcome": decision.failed[0].rule if decision.failed else one.known.value,
            "why": decision.failed[0].text if decision.failed else "",
        }
        table.add_row(*cells(*(row[name] for name in names)))
    console.print(table)
    if console.is_terminal and any(not one.decision.accepted for one in found):
        console.print("Times are UTC. Why an offer was refused: god-miner offers explain ID", style="dim")


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
