"""The answers of another policy: its figures beside the present ones, and the offers that differ."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from pydantic import JsonValue

from miner.api.offers import BacktestReport, BacktestRequest, ChangedAnswer
from miner.dashboard.daemons import SLOW_TIMEOUT_SECONDS, DaemonTrouble
from miner.dashboard.job_texts import answer_text, task_name
from miner.dashboard.layout import PageView
from miner.dashboard.parts import (
    Column,
    FigureTile,
    Table,
    Text,
    box,
    clock,
    number,
    percent,
    set_visible,
    short_model,
)

LISTED_CHANGES = 20


class BacktestView:
    """The result of a backtest, and what is said while it runs and when it fails."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        self._asked = 0
        self._state = Text("", "muted", "p").props('role="status"')
        self._trouble = Text("", "trouble hidden", "p").props('role="alert"')
        self._result = box("stack hidden").style("gap:10px")
        with self._result:
            with box("figures"):
                self._figures = {
                    "accepted": FigureTile("Accepted"),
                    "held_gpu_hours": FigureTile("GPU-hours held"),
                    "occupancy": FigureTile("Occupancy"),
                    "expected_points": FigureTile("Expected points"),
                    "points_per_fleet_gpu_hour": FigureTile("Points per GPU-hour"),
                }
            self._differs = Text("", "muted", "p")
            self._changes = box()
        with self._changes:
            self._table: Table[ChangedAnswer] = Table(
                "Offers answered differently",
                [
                    Column("When", "at", clock, classes="nowrap"),
                    Column("Then", answer_text, classes="states"),
                    Column("Model", "model", short_model),
                    Column("Task", "task_type", task_name, classes="wide-only"),
                    Column("Hours", "hours", number, number=True),
                    Column("Because", "why", classes="why wide-only"),
                ],
                key=attrgetter("task_id", "at"),
            )

    async def run(self, days: float, overrides: Mapping[str, JsonValue]) -> None:
        """Ask the daemon and show its answer, unless another question was asked meanwhile."""
        self._asked += 1
        asked = self._asked
        self._state.show("Replaying the offers. This takes a second, some more for many.")
        set_visible(self._trouble, False)
        try:
            wanted = BacktestRequest(days=days, overrides=dict(overrides))
            report = await self._view.link.request(
                "POST", "/backtest", BacktestReport, wanted, timeout_s=SLOW_TIMEOUT_SECONDS
            )
        except DaemonTrouble as error:
            if asked == self._asked:
                self._state.show("")
                self._trouble.show(_trouble_text(error))
                set_visible(self._trouble, True)
            return
        if asked == self._asked and not self._view.client.is_deleted:
            self._show(report)

    def _show(self, found: BacktestReport) -> None:
        before, after = found.before, found.after
        newest = "the newest " if found.is_limited else ""
        self._state.show(
            f"On {found.gpus}, by policy {found.policy} and profile {found.profile}, {newest}"
            f"{found.offers} offers of {found.days:g} days: now → then."
        )
        set_visible(self._result, found.offers > 0)
        for name, figure in self._figures.items():
            show = percent if name == "occupancy" else _count
            there, here = getattr(before, name), getattr(after, name)
            figure.show(f"{show(there)} → {show(here)}", note=_change(there, here))
        more = f"; the newest {LISTED_CHANGES} are below" if found.changed > LISTED_CHANGES else ""
        self._differs.show(
            f"{found.changed} answered differently{more}." if found.changed else "No answer differs."
        )
        self._table.show(found.changes[:LISTED_CHANGES])
        set_visible(self._changes, found.changed > 0)


def _trouble_text(error: DaemonTrouble) -> str:
    if error.status == 429:
        return "Another backtest is running; try again in a moment."
    return str(error)


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _change(before: float, after: float) -> str:
    if before == after:
        return "the same"
    return f"{(after - before) / before:+.0%}" if before else "from nothing"
