"""Whole little tasks on disk: model, rows, profile and run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from core.choices import Method
from core.evaluation import Era
from core.hardware import Hardware, parse_gpus
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.costs import Site
from core.planning.planner import plan
from core.profile import load_profile
from core.row_facts import facts_from_rows
from core.run_files import RunSpec
from core.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from tests.trainer import tiny
from trainer.own_plan import at_least_tried, model_facts

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
    data: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> RunSpec:
    """A run that begins now, with time to spare; what generates is judged the longer, the more it has."""
    seconds = seconds or (120.0 if task_type is TaskType.GRPO else 600.0)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.json"
    path.write_text(json.dumps(ROWS[task_type](rows) if data is None else data), encoding="utf-8")
    now = time.time()
    given: dict[str, Any] = {
        "task_id": "task",
        "task_type": task_type,
        "model_id": "org/tiny",
        "model_path": str(model or tiny.save(folder / "model")),
        "data_path": str(path),
        "dataset": DATASETS[task_type],
        "era": Era.OFFERS,
        "work_dir": str(folder / "work"),
        "submission_dir": str(folder / "submission"),
        "progress_path": str(folder / "progress.jsonl"),
        "result_path": str(folder / "result.json"),
        "stop_path": str(folder / "stop"),
        "began_at": now,
        "end_by": now + seconds - reserve,
        "deadline_at": now + seconds,
    }
    Path(given["work_dir"]).mkdir(exist_ok=True)
    return RunSpec(**{**given, **changes})


def planned(
    run: RunSpec, profile: Path, *, processes: int = 1, method: Method = Method.LORA, log_every: int = 1
) -> RunSpec:
    """The same run with a plan as a daemon makes it, for so many processes on the CPU."""
    rows = json.loads(Path(run.data_path).read_text("utf-8"))
    hardware = Hardware(gpus=parse_gpus(f"{processes}xcpu"))
    made = plan(
        TaskSpec(task_type=run.task_type, hours=max(run.deadline_at - time.time(), 60) / 3600),
        model_facts(Path(run.model_path), run.model_id),
        facts_from_rows(run.task_type, rows, len(rows)),
        hardware,
        load_profile(str(_with(profile, method, processes))),
        site=Site(hardware, model_here=True, publishes=False),
    )
    made = at_least_tried(made)
    steps = made.steps.model_copy(update={"log_every": log_every})
    path = Path(run.work_dir) / "asked.json"
    path.write_text(made.model_copy(update={"steps": steps}).to_json(), encoding="utf-8")
    return run.model_copy(update={"plan_path": str(path)})


def _with(profile: Path, method: Method, processes: int) -> Path:
    said = yaml.safe_load(profile.read_text("utf-8"))
    said.setdefault("targets", {}).update({"method": method.value, "gpu_strategy": "all"})
    said.setdefault("limits", {}).update({"min_gpus": processes, "max_gpus": processes})
    path = profile.with_name(f"{profile.stem}-{method}-{processes}.yaml")
    path.write_text(yaml.safe_dump(said), encoding="utf-8")
    return path


def plan_of(run: RunSpec) -> TrainingPlan:
    assert run.plan_path is not None
    return TrainingPlan.from_json(Path(run.plan_path).read_bytes())
