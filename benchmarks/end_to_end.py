"""Every kind of text run from its command line to a scored submission, on one process and on two.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON. `trainer.text --run` starts `accelerate
launch … axolotl.cli.train` as it does everywhere; two processes talk over gloo, each with all of the model or
("2 split") with half of it by FSDP2. Random little Llamas and Qwens, each in every cell. What was submitted
is loaded with plain transformers and peft, and scored as `god-miner eval` does, on rows that no run had.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks.report import Report
from benchmarks.training_python import reported
from core.domain.tasks import TaskType

TASKS = (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO)
MODELS, METHODS = ("llama", "qwen"), ("lora", "full")
SPREADS = ("1", "2", "2 split")
#: Each kind with both models and both methods, each number of processes with everything else.
QUICK = (
    (TaskType.INSTRUCT, "llama", "2 split", "lora"),
    (TaskType.INSTRUCT, "qwen", "1", "full"),
    (TaskType.CHAT, "llama", "1", "full"),
    (TaskType.CHAT, "qwen", "2", "lora"),
    (TaskType.DPO, "llama", "2", "full"),
    (TaskType.DPO, "qwen", "1", "lora"),
    (TaskType.GRPO, "llama", "2 split", "full"),
    (TaskType.GRPO, "qwen", "1", "lora"),
)


def run(quick: bool) -> Report:
    cases = QUICK if quick else tuple(product(TASKS, MODELS, SPREADS, METHODS))
    return report_of(list(reported("benchmarks.end_to_end_worker", {"cases": cases})))


def report_of(found: list[dict[str, Any]]) -> Report:
    report = Report(
        "Whole runs: the held-out score of the base and of what was submitted",
        (
            "task",
            "processes",
            "method",
            "model",
            "end",
            "exit",
            "steps",
            "base",
            "submitted",
            "better",
            "wall",
        ),
    )
    report.data["runs"] = found
    for one in found:
        better = one["ours"] < one["base"] if one["lower"] else one["ours"] > one["base"]
        report.rows.append(
            (
                f"{one['task']} {'↓' if one['lower'] else '↑'}",
                one["processes"],
                one["method"],
                one["model"],
                one["end"],
                str(one["exit"]),
                str(one["steps"]),
                f"{one['base']:.4f}",
                f"{one['ours']:.4f}",
                "yes" if better else "NO",
                f"{one['seconds']:.0f} s",
            )
        )
    report.notes.append(
        "One of the launches: " + next((one["command"] for one in found if one["processes"] == "2"), "-")
    )
    report.notes.append(
        "Losses for instruct and chat, DPO's against the base, for GRPO the rewards over the better one's, "
        "less half of the KL to the base. The wall time is mostly imports."
    )
    return report
