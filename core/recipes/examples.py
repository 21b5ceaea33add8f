"""Inputs for a rendering where there is no task yet: `plan --write` and `profile check`.

The columns are those that validators send, the paths those of a run in a container; nothing need exist.
"""

from __future__ import annotations

from core.recipes.run import ImageFiles, RunInputs
from core.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)

#: As the validators' row files have them.
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(
        field_instruction="instruct", field_input="input", field_output="output", field_system="system"
    ),
    TaskType.CHAT: ChatDataset(),
    TaskType.DPO: DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[
            RewardFunction(reward_func="def reward(completions, **kwargs): ...", reward_weight=1.0)
        ],
    ),
}


def example_inputs(task: TaskType, model: str = "base-model", port: int = 29500) -> RunInputs:
    """Inputs with every file that any engine may ask for."""
    text = task.is_text
    cache = "/cache/models"
    return RunInputs(
        model_path=f"{cache}/{model.replace('/', '--')}",
        train_path="/run/data/train.json" if text else "/run/images",
        eval_path="/run/data/eval.json" if text else None,
        output_dir="/run/output",
        work_dir="/run/work",
        config_dir="/run/config",
        plan_path="/run/config/plan.json",
        dataset=DATASETS.get(task),
        image=ImageFiles(
            clip_l=f"{cache}/clip_l.safetensors",
            t5xxl=f"{cache}/t5xxl.safetensors",
            ae=f"{cache}/ae.safetensors",
            text_encoder=f"{cache}/text-encoder",
            vae=f"{cache}/{model.replace('/', '--')}",
        ),
        port=port,
    )
