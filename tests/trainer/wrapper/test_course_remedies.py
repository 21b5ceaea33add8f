"""What a text run does after a launch that failed; what happens in a launch is tested in `test_course.py`."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from core.choices import Attention
from core.plan import TrainingPlan
from core.run_files import RunEnd, RunSpec
from core.tasks import TaskType
from tests.core.recipes.cases import text_plan
from tests.trainer.callbacks.simulated import write_adapter
from trainer.sheet import Failure, Prepared
from trainer.wrapper.course import TextCourse
from trainer.wrapper.signals import StopRequest
from trainer.wrapper.supervise import Ended
from trainer.wrapper.verdict import Attempt, judged


class Launches(TextCourse):
    """Each launch leaves a whole checkpoint and ends as it is told."""

    ends: list[RunEnd]
    resumed: list[str | None]

    def _prepared(self, plan: TrainingPlan | None) -> Any:
        return Prepared(train_path="rows", train_rows=9, eval_rows=0), plan or text_plan(TaskType.INSTRUCT)

    def _trained(self, plan: TrainingPlan, prepared: Prepared, resume: str | None) -> Attempt:
        self.resumed.append(resume)
        folder = self.output / f"checkpoint-{90 if self.launches == 1 else 10}"
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder)
        (folder / "trainer_state.json").write_text("{}")
        return Attempt(self.ends[self.launches - 1], "as told", moment="train")


def launched(folder: Path, *ends: RunEnd) -> Launches:
    now = time.time()
    names = (
        "work_dir",
        "submission_dir",
        "progress_path",
        "result_path",
        "stop_path",
        "model_path",
        "data_path",
    )
    run = RunSpec(
        task_id="1",
        task_type=TaskType.INSTRUCT,
        model_id="org/model",
        began_at=now,
        end_by=now + 3000,
        deadline_at=now + 3200,
        **{name: str(folder / name) for name in names},
    )
    course = Launches(run, StopRequest(Path(run.stop_path)), retries=True)
    course.ends, course.resumed = list(ends), []
    course.follow()
    return course


def test_a_crash_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    course = launched(tmp_path, RunEnd.CRASHED, RunEnd.FINISHED)
    assert course.resumed == [None, str(course.output / "checkpoint-90")]


def test_a_launch_that_begins_anew_is_never_gone_on_from_what_was_before_it(tmp_path: Path) -> None:
    """The model had become NaN at step 90: its checkpoint is none to go on from after the next crash."""
    course = launched(tmp_path, RunEnd.NAN, RunEnd.CRASHED, RunEnd.FINISHED)
    assert course.resumed == [None, None, str(course.output / "checkpoint-10")]


@pytest.mark.parametrize("end", [RunEnd.BAD_DATA, RunEnd.DISK_FULL, RunEnd.STOPPED])
def test_what_nothing_helps_against_is_launched_once(tmp_path: Path, end: RunEnd) -> None:
    assert launched(tmp_path, end).resumed == [None]


def test_a_kernel_of_flash_attention_is_known_by_the_stack(tmp_path: Path) -> None:
    course, plan = launched(tmp_path, RunEnd.FINISHED), text_plan(TaskType.INSTRUCT)
    precision = plan.precision.model_copy(update={"attention": Attention.FLASH_2})
    plan = plan.model_copy(update={"precision": precision})
    said = "CUDA error: no kernel image is available"
    for stack, used in (("in _flash_attn_forward", Attention.SDPA), ("in rms_norm", Attention.FLASH_2)):
        failure = Failure(end=RunEnd.CRASHED, detail=said, traceback=stack)
        attempt = judged(Ended(1, None, ()), None, [failure], marked=True)
        remedy = course._remedy(plan, attempt, [])
        assert remedy is not None
        assert remedy.plan.precision.attention is used
