"""A run and a plan for the tests of the data and scoring halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core.plan import TrainingPlan
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
from tests.core.recipes.cases import text_plan
from tests.trainer import tiny

LONGER = "def longer(completions, **kwargs):\n    return [float(len(one)) for one in completions]"
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(
        field_instruction="instruct", field_input="input", field_output="output"
    ),
    TaskType.CHAT: ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt"),
    TaskType.DPO: DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[RewardFunction(reward_func=LONGER, reward_weight=1)],
        extra_column="extra",
    ),
}
ROWS = {
    TaskType.INSTRUCT: tiny.instruct_rows,
    TaskType.CHAT: tiny.chat_rows,
    TaskType.DPO: tiny.pair_rows,
    TaskType.GRPO: tiny.prompt_rows,
}


def spec(folder: Path, task: TaskType, rows: Any = None, **changes: Any) -> RunSpec:
    """With a model in `folder/model` and the rows (or text) in `folder/rows.json`."""
    model = folder / "model"
    if not model.exists():
        tiny.save(model)
    data = folder / "rows.json"
    data.write_text(
        rows if isinstance(rows, str) else json.dumps(rows if rows is not None else ROWS[task](120))
    )
    values: dict[str, Any] = {
        "task_id": "t",
        "task_type": task,
        "model_id": "a/b",
        "model_path": str(model),
        "data_path": str(data),
        "dataset": DATASETS[task],
        "work_dir": str(folder / "work"),
        "submission_dir": str(folder / "submission"),
        "progress_path": str(folder / "progress.jsonl"),
        "result_path": str(folder / "result.json"),
        "stop_path": str(folder / "stop"),
        "began_at": 0.0,
        "end_by": 1.0,
        "deadline_at": 2.0,
    }
    return RunSpec(**{**values, **changes})


def planned(
    task: TaskType, *, length: int = 256, eval_rows: int = 12, prompt_limit: int | None = None
) -> TrainingPlan:
    plan = text_plan(task)
    sequence = plan.sequence.model_copy(update={"length": length, "prompt_limit": prompt_limit})
    steps = plan.steps.model_copy(update={"eval_rows": eval_rows})
    return plan.model_copy(update={"sequence": sequence, "steps": steps})
