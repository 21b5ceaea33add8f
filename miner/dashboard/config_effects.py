"""What an edited file would change: plans and memory of tasks, answers to offers, or alert rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

Record = Mapping[str, Any]


class EffectsView:
    """The answer to "what does it change?" for one kind of file."""

    def __init__(self, kind: str) -> None:
        self._show = {"profiles": self._show_plans, "policies": self._show_answers}.get(
            kind, self._show_rules
        )
        self._summary = Text("", "muted", "p").props('role="status"')
        self._nothing = Text(
            "Use the button below the text: it tries a change on tasks like those that were offered.",
            "empty",
            "p",
        )
        self._place = box("stack").style("gap:12px")

    def wait(self) -> None:
        self._summary.show("Trying it. This takes a second or two.")

    def show(self, effects: Record | None) -> None:
        """None: not asked, or not known for this text any more."""
        self._place.clear()
        self._summary.show("")
        set_visible(self._nothing, effects is None)
        if effects is not None:
            with self._place:
                self._show(effects)

    def _show_plans(self, effects: Record) -> None:
        changed = [one for one in effects["tasks"] if one["differences"]]
        count = len(effects["tasks"])
        self._summary.show(
            f"{len(changed)} of {count} typical tasks are planned otherwise on {effects['gpus']}, compared "
            f"with {effects['before']} as it is."
        )
        rows: KeyedRows[Record] = KeyedRows(box("rows"), _make_task)
        rows.show((one["task"], one) for one in changed)

    def _show_answers(self, effects: Record) -> None:
        before, after = effects["before"], effects["after"]
        self._summary.show(
            f"{effects['offers']} offers of the last two weeks, now → then: "
            f"accepted {before['accepted']} → {after['accepted']}, "
            f"points expected {before['expected_points']:.4g} → {after['expected_points']:.4g}, "
            f"GPU-hours held {before['held_gpu_hours']:.4g} → {after['held_gpu_hours']:.4g}."
        )
        if effects["changes"]:
            Table(
                "Offers answered differently",
                [
                    Column("Then", _answer, classes="states"),
                    Column("Model", lambda one: one["model"]),
                    Column("Hours", lambda one: number(one["hours"]), number=True),
                    Column("Because", lambda one: one["why"], classes="why wide-only"),
                ],
                key=lambda one: (one["task_id"], one["at"]),
            ).show(effects["changes"][:15])

    def _show_rules(self, effects: Record) -> None:
        rules = effects["rules"]
        self._summary.show(f"{len(rules)} rules change." if len(rules) != 1 else "One rule changes.")
        for one in rules:
            with box("stack"):
                Text(f"{one['rule']}: {one['what']}", "strong")
                if one["what"] == "changed":
                    _difference_table(one["values"], "key")


def _make_task(task: Record) -> Callable[[Record], None]:
    before, after = task["before"], task["after"]
    with box("stack"):
        Text(task["task"], "strong")
        Table(
            f"Plan of {task['task']}",
            [
                Column("", lambda one: one["name"], classes="nowrap"),
                Column("Now", lambda one: one["before"]),
                Column("Then", lambda one: (one["after"], one["tone"])),
            ],
            key=lambda one: one["name"],
        ).show(_plan_rows(before, after))
        with box(tag="details"):
            Text(f"All {len(task['differences'])} differences", "small", "summary")
            _difference_table(task["differences"], "what")
    return lambda _: None


def _plan_rows(before: Record, after: Record) -> list[Record]:
    rows = [
        ("Plan", _verdict(before), _verdict(after), "" if after["feasible"] else "bad"),
        ("GPUs", before["gpus"], after["gpus"], ""),
        ("Micro × accumulation × GPUs", before["batch"], after["batch"], ""),
        ("Memory of a GPU", _memory(before), _memory(after), ""),
        ("Takes", duration(before["seconds"]), duration(after["seconds"]), ""),
        ("Epochs", number(before["epochs"], 3), number(after["epochs"], 3), ""),
        ("Gives way", _concessions(before, after), _concessions(after, before), ""),
    ]
    return [
        {"name": name, "before": there, "after": here, "tone": tone}
        for name, there, here, tone in rows
        if there != here or name in ("Memory of a GPU", "Takes")
    ]


def _verdict(plan: Record) -> str:
    return "feasible" if plan["feasible"] else f"refused: {plan['reason']}"


def _memory(plan: Record) -> str:
    return f"{size(plan['memory_bytes'])} of {size(plan['budget_bytes'])}"


def _concessions(plan: Record, other: Record) -> str:
    """What gives way in this plan only."""
    own = [text for text in plan["gave_way"] if text not in other["gave_way"]]
    more = f"; and {len(own) - 4} more" if len(own) > 4 else ""
    return "; ".join(own[:4]) + more or ("the same" if plan["gave_way"] else "nothing")


def _difference_table(values: Sequence[Record], name: str) -> None:
    Table(
        "Differences",
        [
            Column("", lambda one: one[name], classes="mono"),
            Column("Now", lambda one: one["before"]),
            Column("Then", lambda one: one["after"]),
        ],
        key=lambda one: (one.get("part"), one[name]),
    ).show(values)


def _answer(one: Record) -> tuple[str, Tone]:
    return ("accepted", "good") if one["accepted"] else ("refused", "muted")
