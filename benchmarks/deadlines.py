"""Trainings that are cut off by the clock or killed at random instants: what is there then.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. Real Axolotl on the CPU, LoRA and full
fine-tunes in turn, submissions every few steps. A watcher reads every file of the submission to its last byte
all the time; at the end the folder is loaded with plain transformers and peft.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported

CUT_OFFS, KILLS = 20, 50
QUICK_CUT_OFFS, QUICK_KILLS = 3, 5


def run(quick: bool) -> Report:
    cut_offs, kills = (QUICK_CUT_OFFS, QUICK_KILLS) if quick else (CUT_OFFS, KILLS)
    asked = {"cut_offs": cut_offs, "kills": kills, "seed": 0}
    return report_of(list(reported("benchmarks.deadlines_worker", asked)))


def report_of(found: list[dict[str, Any]]) -> Report:
    report = Report(
        "Trainings cut off or killed at random: the submission",
        ("what", "task", "trainings", "submissions", "looks", "whole at the end", "faults", "latest"),
    )
    report.data["trainings"] = found
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        groups[one["what"], one["task"]].append(one)
    for (what, task), some in groups.items():
        report.rows.append(_row(what, task, some))
    faults = [
        f"{one['what']} {one['task']} at {one['seconds']:.2f} s: {fault}"
        for one in found
        for fault in one["wrong"]
    ]
    report.notes += faults or ["No fault: no look and no load found anything but a complete model."]
    report.notes += _NOTES
    return report


def _row(what: str, task: str, some: list[dict[str, Any]]) -> tuple[str, ...]:
    late = [one["late_s"] for one in some if "late_s" in one]
    return (
        what,
        task,
        str(len(some)),
        f"{sum(one['submissions'] for one in some):,}",
        f"{sum(one['looks'] for one in some):,}",
        f"{sum(one['there'] for one in some)} of {len(some)}",
        str(sum(len(one["wrong"]) for one in some)),
        f"{max(late):+.1f} s" if late else "-",
    )


_NOTES = (
    "Cut off: the deadline comes 1 to 6 s (GRPO 3 to 10 s) after the training began, at random. 'Latest' "
    "is the largest distance from that deadline to the training's last word; the reserve behind "
    "it is three minutes in earnest.",
    "Killed: SIGKILL to the whole family 0 to 4 s after the first step, at random, in trainings that submit "
    "every other step. Before the first submission nothing is there, and nothing half. Whatever is found "
    "is put in order as a second attempt would, and loaded.",
)
