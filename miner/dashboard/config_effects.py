"""Effects of an edited file: plans and memory of tasks, answers to offers, or alert rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from miner.api.config_files import PlanEffects, PlanFigures, RuleEffects, TaskEffects
from miner.api.offers import BacktestComparison, ChangedAnswer
from miner.dashboard.job_texts import answer_text
from miner.dashboard.parts import (
    Column,
    KeyedRows,
    Table,
    Text,
    Tone,
    box,
    duration,
    number,
    set_visible,
    size,
)


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
