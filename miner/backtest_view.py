"""A backtest on the terminal: what each policy would have taken, how busy the GPUs, what it was worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from miner.offers.backtest import Difference, Run
from miner.offers.summary import Summary

Page = Text | Table
#: Offers answered differently that are listed; all of them are in the JSON.
LISTED = 20
_BARS = "▁▂▃▄▅▆▇█"


def pages(runs: Sequence[Run], changes: Sequence[Difference]) -> Iterator[Page]:
    yield _figures([run.summary for run in runs])
    yield Text("\nGPUs held, from the first offer to the last", style="bold")
    for run in runs:
        yield Text(f"  {bars(run.summary.occupancy)}  {run.summary.name}")
    if changes:
        yield Text(f"\nAnswered differently by {runs[-1].summary.name}: {len(changes)}", style="bold")
        yield _changes(changes[:LISTED])
        if len(changes) > LISTED:
            yield Text(f"  and {len(changes) - LISTED} more; --json has all", style="dim")


def bars(shares: Sequence[float]) -> str:
    """One cell per stretch; blank where nothing is held."""
    return "".join(
        " " if share <= 0.005 else _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)] for share in shares
    )


def when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _figures(summaries: Sequence[Summary]) -> Table:
    table = _table("", *(one.name for one in summaries))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, cells in _rows(summaries):
        table.add_row(label, *cells)
    return table


def _rows(summaries: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    yield "offers", [str(one.offers) for one in summaries]
    yield "accepted", [f"{one.accepted} ({_share(one.accepted, one.offers)})" for one in summaries]
    for rule in dict.fromkeys(rule for one in summaries for rule in one.refused):
        yield f"  refused by {rule}", [str(one.refused.get(rule, 0)) for one in summaries]
    yield "GPU-hours held", [f"{one.held_hours:.1f} of {one.fleet_hours:.1f}" for one in summaries]
    yield "occupancy", [f"{one.mean_occupancy:.0%}" for one in summaries]
    yield "expected points", [f"{one.points:.1f}" for one in summaries]
    yield "  per GPU-hour of the fleet", [f"{one.per_fleet_hour:.3f}" for one in summaries]
    yield "  per GPU-hour held", [f"{one.per_held_hour:.3f}" for one in summaries]
    for known in dict.fromkeys(known for one in summaries for known in one.known):
        yield f"{known} in fact", [str(one.known.get(known, 0)) for one in summaries]
    if any(one.realised is not None for one in summaries):
        yield (
            "points of those published or failed",
            ["–" if one.realised is None else f"{one.realised:.1f}" for one in summaries],
        )


def _changes(changes: Sequence[Difference]) -> Table:
    table = _table("when (UTC)", "task", "model", "hours", "now", "refused because")
    for one in changes:
        offer = one.after.offered.offer
        table.add_row(
            when(one.after.offered.at),
            offer.task_type.value,
            offer.model,
            f"{offer.hours_to_complete:g}",
            "accepted" if one.after.decision.accepted else "refused",
            one.why,
        )
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def as_data(run: Run) -> dict[str, Any]:
    """For programs: the figures, and every answer."""
    one = run.summary
    return {
        "policy": one.name,
        "offers": one.offers,
        "accepted": one.accepted,
        "refused": one.refused,
        "fleet_gpu_hours": one.fleet_hours,
        "held_gpu_hours": one.held_hours,
        "occupancy": one.mean_occupancy,
        "occupancy_over_time": list(one.occupancy),
        "expected_points": one.points,
        "points_per_fleet_gpu_hour": one.per_fleet_hour,
        "points_per_held_gpu_hour": one.per_held_hour,
        "known": one.known,
        "realised_points": one.realised,
        "answers": [
            {
                "task_id": entry.offered.offer.task_id,
                "at": entry.offered.at,
                "accepted": entry.decision.accepted,
                "score": entry.decision.score,
                "points": entry.value.points if entry.value else None,
                "gpus": entry.decision.placement.gpus if entry.decision.placement else None,
                "failed": [reason.rule for reason in entry.decision.failed],
            }
            for entry in run.entries
        ],
    }
