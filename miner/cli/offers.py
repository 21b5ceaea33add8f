"""`god-miner offers`: past offers, the answers and their reasons."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from miner.cli.options import AsJson, Limit, Since, load_settings, parse_time
from miner.cli.output import echo, echo_json, print_pages, show_time, terminal

if TYPE_CHECKING:
    from miner.offers.past_offers import StoredOffer

app = typer.Typer(help="Show past offers, the answers and their reasons.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(help="Number of an offer in the list, or its task's id.")]


@app.command("list")
def list_offers(
    since: Since = None,
    accepted: Annotated[
        bool | None, typer.Option("--accepted/--refused", help="Show only these. Default: both.")
    ] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List offers, oldest first, with answers and outcomes."""
    from miner.offers.past_offers import OfferFilter, stored_offers
    from miner.offers.views import offer_summary
    from miner.store.database import open_store

    start = 0.0 if since is None else parse_time(since, time.time())
    with open_store(load_settings().store_dir) as connection:
        found = stored_offers(connection, OfferFilter(since=start, accepted=accepted, most=limit))
    if as_json:
        echo_json([offer_summary(one) for one in found])
        return
    _print_list(found)


@app.command()
def show(which: Which, as_json: AsJson = False) -> None:
    """Show one offer as received, the answer and the outcome."""
    from miner.offers.views import offer_summary

    one = _load_offer(which)
    if as_json:
        echo_json(offer_summary(one))
        return
    for name, value in offer_summary(one).model_dump(mode="json").items():
        if name.endswith("_at"):
            value = f"{show_time(value, year=True)} UTC"
        echo(f"{name.replace('_', ' '):14} {'–' if value is None else value}")


@app.command()
def explain(which: Which, as_json: AsJson = False) -> None:
    """Explain an answer: every rule, every factor, and what would have to change."""
    from miner.cli.render.offers import decision_pages, offer_heading
    from miner.offers.views import decision_details

    one = _load_offer(which)
    if as_json:
        echo_json(decision_details(one.offer, one.decision))
        return
    console = terminal()
    what = f"start without an accepted offer (job {one.number})" if one.is_start else f"offer {one.number}"
    console.print(
        f"{what}, {show_time(one.received_at, year=True)} UTC, from {one.validator}: {one.outcome.value}"
    )
    console.print(f"{offer_heading(one.offer)}\n")
    print_pages(decision_pages(one.offer, one.decision))


def _load_offer(which: str) -> StoredOffer:
    from miner.offers.past_offers import find_stored_offer
    from miner.store.database import open_store

    with open_store(load_settings().store_dir) as connection:
        return find_stored_offer(connection, which)


def _print_list(found: list[StoredOffer]) -> None:
    from miner.cli.render.terminal import WIDE_COLUMNS, one_line_cells, one_line_table

    console = terminal()
    names = ["id", "came", "type", "model", "hours", "answer", "outcome"]
    names += ["score", "why"] if console.width >= WIDE_COLUMNS else []
    table = one_line_table(*names, cut=("model", "why"), right=("id", "hours"))
    for one in found:
        decision = one.decision
        row = {
            "id": str(one.number),
            "came": show_time(one.received_at, seconds=False),
            "type": one.offer.task_type.value.removesuffix("Task").removesuffix("Text"),
            "model": one.offer.model,
            "hours": f"{one.offer.hours_to_complete:g}",
            "answer": "accepted" if decision.accepted else "refused",
            "score": "" if decision.score is None else f"{decision.score:.3f}",
            # What became of it, or the rule that it failed.
            "outcome": decision.failed[0].rule if decision.failed else one.outcome.value,
            "why": decision.failed[0].text if decision.failed else "",
        }
        table.add_row(*one_line_cells(*(row[name] for name in names)))
    console.print(table)
    if console.is_terminal and any(not one.decision.accepted for one in found):
        console.print("Times are UTC. Why an offer was refused: god-miner offers explain ID", style="dim")
