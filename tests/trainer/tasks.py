"""Whole little tasks on disk: model, rows, profile and run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from core.data.facts import facts_from_rows
from core.domain.choices import Method
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile
from core.runs.remedies import forced_feasible
from core.runs.run_files import RunSpec
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny
from tests.trainer.run_specs import run_spec
from trainer.runner.planning import model_facts

#: Something that a few steps can learn: answers with many an "apples" in them.
REWARD = """
def apples(completions, **kwargs):
    return [one.count("apples") + 0.1 * one.count("a") for one in completions]
"""
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(
        field_instruction="instruct", field_input="input", field_output="output"
    ),
    TaskType.CHAT: ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt"),
    TaskType.DPO: DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt", reward_functions=[RewardFunction(reward_func=REWARD, reward_weight=1.0)]
    ),
}
ROWS = {
    TaskType.INSTRUCT: tiny.instruct_rows,
    TaskType.CHAT: tiny.chat_rows,
    TaskType.DPO: tiny.pair_rows,
    TaskType.GRPO: tiny.prompt_rows,
}
TEXT_TASKS = tuple(DATASETS)
LONGER = "def longer(completions, **kwargs):\n    return [float(len(one)) for one in completions]"
#: For data and scores without a training: every completion has a reward, and rows have an extra column.
SCORED: dict[TaskType, DatasetType] = {
    **DATASETS,
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[RewardFunction(reward_func=LONGER, reward_weight=1)],
        extra_column="extra",
    ),
}
#: Ends when the clock says so, wherever that is: nothing else bounds it.
ENDLESS: dict[str, Any] = {
    "targets": {"num_epochs": 500, "max_steps": None, "eval_steps": None, "save_steps": None},
    "limits": {"max_steps": None, "max_epochs": 1000, "reserve": "1s", "reserve_share": 0},
}


def write_profile(path: Path, **parts: dict[str, Any]) -> Path:
    """A profile for the CPU with these parts."""
    path.write_text(yaml.safe_dump({"extends": "cpu-demo", **parts}), encoding="utf-8")
    return path


def task(
    folder: Path,
    task_type: TaskType,
    seconds: float | None = None,
    *,
    rows: int = 200,
    reserve: float = 5.0,
    model: Path | None = None,
    data: list[Any] | str | None = None,
    **changes: Any,
) -> RunSpec:
    """A run that begins now, with time to spare; what generates is judged the longer, the more it has."""
    seconds = seconds or (120.0 if task_type.generates else 600.0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.json"
    content = ROWS[task_type](rows) if data is None else data
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    values: dict[str, Any] = {
        "task_type": task_type,
        "model_id": "org/tiny",
        "model_path": str(model or tiny.save(folder / "model")),
        "dataset": DATASETS[task_type],
    }
    (folder / "work").mkdir(exist_ok=True)
    return run_spec(folder, seconds - reserve, reserve, **{**values, **changes})


def spec(folder: Path, task_type: TaskType, rows: Any = None, **changes: Any) -> RunSpec:
    """A run that is never started: model in `folder/model`, rows (or text) in `folder/rows.json`."""
    model = folder / "model"
    changes = {"dataset": SCORED[task_type], **changes}
    return task(folder, task_type, rows=120, model=model if model.exists() else None, data=rows, **changes)


def planned(
    run: RunSpec,
    profile: Path,
    *,
    processes: int = 1,
    machines: int = 1,
    method: Method = Method.LORA,
    log_every: int = 1,
) -> RunSpec:
    """The same run with a plan as a daemon makes it, for so many processes on the CPU."""
    rows = json.loads(Path(run.data_path).read_text("utf-8"))
    hardware = Hardware(gpus=parse_gpus(f"{machines}x{processes // machines}xcpu"))
    plan = plan_task(
        TaskSpec(task_type=run.task_type, hours=max(run.deadline_at - time.time(), 60) / 3600),
        model_facts(Path(run.model_path), run.model_id),
        facts_from_rows(run.task_type, rows, len(rows)),
        hardware,
        load_profile(str(_with(profile, method, processes, machines))),
        conditions=JobConditions(hardware, model_cached=True, publishes=False),
    )
    plan = forced_feasible(plan)
    steps = plan.steps.model_copy(update={"log_every": log_every})
    path = Path(run.work_dir) / "asked.json"
    path.write_text(plan.model_copy(update={"steps": steps}).to_json(), encoding="utf-8")
    return run.model_copy(update={"plan_path": str(path)})


def _with(profile: Path, method: Method, processes: int, machines: int) -> Path:
    said = yaml.safe_load(profile.read_text("utf-8"))
    said.setdefault("targets", {}).update({"method": method.value, "gpu_strategy": "all", "nodes": machines})
    said.setdefault("limits", {}).update({"min_gpus": processes, "max_gpus": processes})
    path = profile.with_name(f"{profile.stem}-{method}-{processes}.yaml")
    path.write_text(yaml.safe_dump(said), encoding="utf-8")
    return path


def plan_of(run: RunSpec) -> TrainingPlan:
    assert run.plan_path is not None
    return TrainingPlan.from_json(Path(run.plan_path).read_bytes())


def rows_plan(
    task: TaskType, *, length: int = 256, eval_rows: int = 12, prompt_limit: int | None = None
) -> TrainingPlan:
    plan = text_plan(task)
    sequence = plan.sequence.model_copy(update={"length": length, "prompt_limit": prompt_limit})
    steps = plan.steps.model_copy(update={"eval_rows": eval_rows})
    return plan.model_copy(update={"sequence": sequence, "steps": steps})
