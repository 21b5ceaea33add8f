"""Our plugin's own decisions; what it does in a training is tested where one runs (`test_text_runner.py`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.domain.choices import Parallelism
from core.domain.tasks import TaskType
from core.planning.plan import EmaPlan
from core.runs.progress import NoteEvent, parse_events
from tests.core.engines.cases import text_plan
from tests.trainer.tasks import rows_plan
from trainer.axolotl.plugin import _average, _prompts
from trainer.session.progress_log import ProgressLog


def test_a_sharded_model_has_no_moving_average_and_a_note_says_so(tmp_path: Path) -> None:
    """Sharding replaces the weights after the plugin has seen them: an average of those would stand still."""
    plan = rows_plan(TaskType.INSTRUCT).model_copy(update={"ema": EmaPlan(decay=0.9, every=1)})
    progress = tmp_path / "progress.jsonl"
    trainer = SimpleNamespace(is_fsdp_enabled=True, model=torch.nn.Linear(2, 2))
    assert _average(plan, trainer, ProgressLog(progress)) is None
    (line,) = parse_events(progress.read_bytes())
    assert isinstance(line.event, NoteEvent)
    assert "sharded" in line.event.text
    trainer.is_fsdp_enabled = False
    assert _average(plan, trainer, ProgressLog(None)) is not None


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
