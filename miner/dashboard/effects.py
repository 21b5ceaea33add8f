"""Effects of a change that is not made yet: of an edited file, or of another policy on past offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pydantic import JsonValue

from miner.api.config_files import PlanEffects, PlanFigures, RuleEffects, TaskEffects
from miner.api.offers import BacktestComparison, BacktestReport, BacktestRequest, ChangedAnswer
from miner.dashboard.daemons import SLOW_TIMEOUT_SECONDS, DaemonTrouble
from miner.dashboard.job_texts import answer_text, task_name
from miner.dashboard.layout import PageView
from miner.dashboard.parts import (
    Column,
    FigureTile,
    KeyedRows,
    Table,
    Text,
    Tone,
    box,
    clock,
    duration,
    number,
    percent,
    set_visible,
    short_model,
    size,
)

LISTED_CHANGES = 20


class EffectsView:
    """The answer to "what does it change?" for one file."""

    def __init__(self) -> None:
        self._summary = Text("", "muted", "p").props('role="status"')
        self._nothing = Text(
            "Use the button below the text: it tries a change on tasks like those that were offered.",
            "empty",
            "p",
        )
        self._place = box("stack").style("gap:12px")

    def wait(self) -> None:
        self._summary.show("Trying it. This takes a second or two.")

    def show(self, effects: RuleEffects | PlanEffects | BacktestComparison | None) -> None:
        """Show the effects; None if they were not asked for, or are not known for this text any more."""
        self._place.clear()
        self._summary.show("")
        set_visible(self._nothing, effects is None)
        with self._place:
            if isinstance(effects, PlanEffects):
                self._show_plans(effects)
            elif isinstance(effects, BacktestComparison):
                self._show_answers(effects)
            elif effects is not None:
                self._show_rules(effects)

    def _show_plans(self, effects: PlanEffects) -> None:
        changed = [one for one in effects.tasks if one.differences]
        count = len(effects.tasks)
        self._summary.show(
            f"{len(changed)} of {count} typical tasks are planned otherwise on {effects.gpus}, compared "
            f"with {effects.before} as it is."
        )
        rows: KeyedRows[TaskEffects] = KeyedRows(box("rows"), _make_task)
        rows.show((one.task, one) for one in changed)

    def _show_answers(self, effects: BacktestComparison) -> None:
        before, after = effects.before, effects.after
        self._summary.show(
            f"{effects.offers} offers of the last two weeks, now → then: "
            f"accepted {before.accepted} → {after.accepted}, "
            f"points expected {before.expected_points:.4g} → {after.expected_points:.4g}, "
            f"GPU-hours held {before.held_gpu_hours:.4g} → {after.held_gpu_hours:.4g}."
        )
        if effects.changes:
            offers: Table[ChangedAnswer] = Table(
                "Offers answered differently",
                [
                    Column("Then", answer_text, classes="states"),
                    Column("Model", "model"),
                    Column("Hours", "hours", number, number=True),
                    Column("Because", "why", classes="why wide-only"),
                ],
                key=attrgetter("task_id", "at"),
            )
            offers.show(effects.changes[:15])

    def _show_rules(self, effects: RuleEffects) -> None:
        rules = effects.rules
        self._summary.show(f"{len(rules)} rules change." if len(rules) != 1 else "One rule changes.")
        for one in rules:
            with box("stack"):
                Text(f"{one.rule}: {one.what}", "strong")
                if one.what == "changed":
                    _difference_table([(value.key, value.before, value.after) for value in one.values])


class _Line(NamedTuple):
    """A value before and after an edit."""

    name: str
    before: str
    after: str
    tone: Tone = ""


def _make_task(task: TaskEffects) -> Callable[[TaskEffects], None]:
    with box("stack"):
        Text(task.task, "strong")
        plan: Table[_Line] = Table(
            f"Plan of {task.task}",
            [Column("", "name", classes="nowrap"), Column("Now", "before"), Column("Then", _after)],
            key=attrgetter("name"),
        )
        plan.show(_plan_lines(task.before, task.after))
        with box(tag="details"):
            Text(f"All {len(task.differences)} differences", "small", "summary")
            _difference_table([(change.what, change.before, change.after) for change in task.differences])
    return lambda _: None


def _after(line: _Line) -> tuple[str, Tone]:
    return line.after, line.tone


def _plan_lines(before: PlanFigures, after: PlanFigures) -> list[_Line]:
    lines = [
        _Line("Plan", _verdict(before), _verdict(after), "" if after.feasible else "bad"),
        _Line("GPUs", before.gpus, after.gpus),
        _Line("Micro × accumulation × GPUs", before.batch, after.batch),
        _Line("Memory of a GPU", _memory(before), _memory(after)),
        _Line("Takes", duration(before.seconds), duration(after.seconds)),
        _Line("Epochs", number(before.epochs, 3), number(after.epochs, 3)),
        _Line("Gives way", _concessions(before, after), _concessions(after, before)),
    ]
    return [line for line in lines if line.before != line.after or line.name in ("Memory of a GPU", "Takes")]


def _verdict(plan: PlanFigures) -> str:
    return "feasible" if plan.feasible else f"refused: {plan.reason}"


def _memory(plan: PlanFigures) -> str:
    return f"{size(plan.memory_bytes)} of {size(plan.budget_bytes)}"


def _concessions(plan: PlanFigures, other: PlanFigures) -> str:
    """Say what gives way in this plan only."""
    own = [text for text in plan.gave_way if text not in other.gave_way]
    more = f"; and {len(own) - 4} more" if len(own) > 4 else ""
    return "; ".join(own[:4]) + more or ("the same" if plan.gave_way else "nothing")


def _difference_table(values: Sequence[tuple[str, str, str]]) -> None:
    table: Table[_Line] = Table(
        "Differences",
        [Column("", "name", classes="mono"), Column("Now", "before"), Column("Then", "after")],
        key=_same,
    )
    table.show(_Line(*value) for value in values)


def _same(line: _Line) -> _Line:
    return line


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
