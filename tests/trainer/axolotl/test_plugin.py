"""Our plugin's own decisions; what it does in a training is tested where one runs (`test_text_runner.py`)."""

from __future__ import annotations

import pytest

from core.domain.choices import Parallelism
from core.domain.tasks import TaskType
from tests.core.engines.cases import text_plan
from trainer.axolotl.plugin import _prompts


@pytest.mark.parametrize(
    ("parallelism", "micro", "completion", "prompts"),
    [
        (Parallelism.DDP, 1, 256, 16),  # runs out and goes on in halves
        (Parallelism.FSDP, 8, 256, 16),
        (Parallelism.FSDP, 1, 256, 2),
        (Parallelism.FSDP, 8, 64, 4),
        (Parallelism.FSDP, 1, 16, 1),
    ],
)
def test_ranks_that_share_a_model_generate_no_more_at_once_than_in_a_step(
    parallelism: Parallelism, micro: int, completion: int, prompts: int
) -> None:
    plan = text_plan(TaskType.GRPO, parallelism=parallelism, gpus=2)
    batch = plan.batch.model_copy(update={"micro": micro, "accumulation": 4})
    sequence = plan.sequence.model_copy(update={"completion_limit": completion})
    assert _prompts(plan.model_copy(update={"batch": batch, "sequence": sequence})) == prompts
