"""Runs that the control file asks for something while they train, on real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.tasks import TaskType
from core.runs.control import CONTROL_FILE
from core.runs.progress import ControlEvent, StepEvent
from core.runs.run_files import RunEnd, RunResult
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from tests.trainer.runner.test_text_runner import events, execute
from tests.trainer.tasks import plan_of, planned, task, write_profile

STEPS = 8


@pytest.mark.thorough_rows("axolotl-Dpo")
@pytest.mark.parametrize(
    ("engine", "task_type", "packing", "micro"),
    [
        ("axolotl", TaskType.INSTRUCT, False, 2),
        ("axolotl", TaskType.DPO, False, 2),
        ("native", TaskType.INSTRUCT, False, 2),
        ("axolotl", TaskType.INSTRUCT, True, 2),
        ("axolotl", TaskType.INSTRUCT, True, 8),
        ("axolotl", TaskType.DPO, False, 8),
    ],
)
def test_smaller_or_larger_passes_from_the_middle_on_change_no_loss(
    forks: ForkServer, tmp_path: Path, engine: str, task_type: TaskType, packing: bool, micro: int
) -> None:
    """Optimizer, schedule and order go on: only rounding differs. Packed as Axolotl does it for attention of
    variable lengths, all sequences of a micro-batch in one row."""
    targets = {
        "sample_packing": packing,
        "sequence_len": 64,
        "engine": engine,
        "max_steps": STEPS,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lora_dropout": 0.0,
    }
    raw = {"axolotl": {"multipack_real_batches": False}} if packing else {}
    profile = write_profile(tmp_path / "profile.yaml", targets=targets, engine_config=raw)
    model = tiny.save(tmp_path / "model")
    results: list[RunResult] = []
    curves: list[list[float | None]] = []
    for name, patch in (("undisturbed", ""), ("asked", f"asks_after:3:{micro}:0.8")):
        control = str(tmp_path / name / CONTROL_FILE)
        run = planned(task(tmp_path / name, task_type, model=model, control_path=control), profile)
        plan = plan_of(run)
        assert (plan.engine, plan.batch.micro, plan.sequence.packing) == (engine, 4, packing)
        results.append(execute(run, forks, patch=f"judged_every:{STEPS} {patch}"))
        assert results[-1].end is RunEnd.FINISHED, results[-1].detail
        curves.append([event.loss for event in events(run) if isinstance(event, StepEvent)])
    assert len(curves[0]) == STEPS
    # Joined micro-batches are one mean over their labels, which are not quite as many in each.
    close = 2e-2 if packing and micro > 4 else 1e-4
    assert curves[1] == pytest.approx(curves[0], rel=close)
    undisturbed, asked = (result.best for result in results)
    assert undisturbed is not None
    assert asked is not None
    assert asked.value == pytest.approx(undisturbed.value, rel=close)
    (answer,) = [event for event in events(run) if isinstance(event, ControlEvent)]
    assert (answer.number, answer.applied, answer.micro, answer.duty) == (7, True, micro, 0.8)
    assert answer.text == f"after step 3: sequences in a pass 4 → {micro}; duty 1 → 0.8"
