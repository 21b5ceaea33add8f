"""What a text run does after a launch that failed; launches themselves: `test_text_runner.py`."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Attention
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.runs.run_files import RunEnd, RunResult
from tests.core.recipes.cases import text_plan
from tests.trainer.run_specs import run_spec
from tests.trainer.session.simulated import write_adapter
from trainer.handoff import PreparedRows, TrainingFailure
from trainer.runner.processes import StopRequest
from trainer.runner.supervise import LaunchResult, ProcessEnd, launch_result
from trainer.runner.text_runner import TextRunner


class Launches(TextRunner):
    """Each launch leaves a whole checkpoint and ends as it is told."""

    ends: list[RunEnd]
    resumed: list[str | None]

    def _prepare(self, plan: TrainingPlan | None) -> Any:
        return PreparedRows(train_path="rows", train_rows=9, eval_rows=0), plan or text_plan(
            TaskType.INSTRUCT
        )

    def _train(self, plan: TrainingPlan, prepared: PreparedRows, resume: str | None) -> LaunchResult:
        self.resumed.append(resume)
        folder = self.output / f"checkpoint-{90 if self.launches == 1 else 10}"
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder)
        (folder / "trainer_state.json").write_text("{}")
        return LaunchResult(self.ends[self.launches - 1], "as told", moment="train")


def launched(folder: Path, *ends: RunEnd, retries: bool = True) -> Launches:
    run = run_spec(folder, 3000, 200)
    runner = Launches(run, StopRequest(Path(run.stop_path)), retries=retries)
    runner.ends, runner.resumed = list(ends), []
    runner.execute()
    return runner


@pytest.mark.parametrize(
    ("ends", "resumed"),
    [
        ([RunEnd.CRASHED, RunEnd.FINISHED], [None, 90]),
        # The model had become NaN at step 90: its checkpoint is none to go on from after the next crash.
        ([RunEnd.NAN, RunEnd.CRASHED, RunEnd.FINISHED], [None, None, 10]),
        ([RunEnd.BAD_DATA], [None]),
    ],
    ids=["a crash", "a launch that starts again", "what nothing helps against"],
)
def test_a_retry_resumes_from_the_newest_checkpoint_of_a_training_that_it_continues(
    tmp_path: Path, ends: list[RunEnd], resumed: list[int | None]
) -> None:
    runner = launched(tmp_path, *ends)
    paths = [step and str(runner.output / f"checkpoint-{step}") for step in resumed]
    assert runner.resumed == paths


def test_with_a_daemon_a_failure_is_reported_and_left_to_it(tmp_path: Path) -> None:
    runner = launched(tmp_path, RunEnd.OOM, retries=False)
    result = RunResult.model_validate_json(Path(runner.run.result_path).read_bytes())
    assert (result.end, result.moment, int(result.exit_code)) == (RunEnd.OOM, "train", 30)
    assert len(runner.resumed) == 1


def test_a_kernel_of_liger_is_known_by_the_stack(tmp_path: Path) -> None:
    runner, plan = launched(tmp_path, RunEnd.FINISHED), text_plan(TaskType.INSTRUCT)
    plan = plan.model_copy(update={"precision": plan.precision.model_copy(update={"liger": True})})
    stack = 'File "/x/liger_kernel/ops/rope.py", line 9, in rope_forward\nCompilationError: at 9:1'
    failure = TrainingFailure(end=RunEnd.CRASHED, detail="CompilationError: at 9:1", traceback=stack)
    attempt = launch_result(ProcessEnd(1, None, ()), None, [failure], marked=True)
    assert (
        attempt.detail
        == 'CompilationError: at 9:1 (Liger: File "/x/liger_kernel/ops/rope.py", line 9, in rope_forward)'
    )
    remedy = runner._remedy(plan, attempt, [])
    assert remedy is not None
    assert not remedy.plan.precision.liger


def test_a_kernel_of_flash_attention_is_known_by_the_stack(tmp_path: Path) -> None:
    runner, plan = launched(tmp_path, RunEnd.FINISHED), text_plan(TaskType.INSTRUCT)
    precision = plan.precision.model_copy(update={"attention": Attention.FLASH_2})
    plan = plan.model_copy(update={"precision": precision})
    said = "CUDA error: no kernel image is available"
    for stack, used in (("in _flash_attn_forward", Attention.SDPA), ("in rms_norm", Attention.FLASH_2)):
        failure = TrainingFailure(end=RunEnd.CRASHED, detail=said, traceback=stack)
        attempt = launch_result(ProcessEnd(1, None, ()), None, [failure], marked=True)
        remedy = runner._remedy(plan, attempt, [])
        assert remedy is not None
        assert remedy.plan.precision.attention is used
