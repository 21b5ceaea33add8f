"""Comparing the files of an image run at its end: what it costs, and from where its time comes."""

from __future__ import annotations

from typing import Any

import pytest

from core.data.facts import assumed_facts
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, resolve_profile
from core.profile.targets import CheckpointChoiceTarget
from tests.doubles.each import each

KREA2, FLUX = ImageModelType.KREA2, ImageModelType.FLUX


def planned(kind: ImageModelType = KREA2, hours: float = 1.0, n: int = 40, **choice: Any) -> TrainingPlan:
    model = facts_from_name("a/model", None, kind)
    profile = resolve_profile(load_profile("steady"), TaskType.IMAGE, model, n)
    asked = CheckpointChoiceTarget(**choice) if choice else None
    targets = profile.targets.model_copy(update={"checkpoint_choice": asked})
    spec = TaskSpec(task_type=TaskType.IMAGE, hours=hours, image_type=kind)
    data = assumed_facts(TaskType.IMAGE, n, image_type=kind)
    own = profile.model_copy(update={"targets": targets})
    return plan_task(spec, model, data, Hardware(gpus=parse_gpus("1xH100")), own)


@each(("kind", "hours"), [(KREA2, 1.5), (FLUX, 2.0), (ImageModelType.Z_IMAGE, 1.0)])
def test_in_spare_time_the_steps_stay_and_the_saves_are_spread(kind: ImageModelType, hours: float) -> None:
    without, plan = planned(kind, hours), planned(kind, hours, files=4)
    assert without.image is not None
    assert without.image.choice is None
    assert plan.image is not None
    assert plan.image.choice is not None
    assert plan.steps.total == without.steps.total
    choice, saves = plan.image.choice, -(-plan.steps.total // plan.steps.save_every)
    assert (choice.files, saves) == (4, 4)
    assert plan.steps.keep_checkpoints >= saves
    assert plan.time["choose"] == choice.seconds > 0
    assert plan.time.slack_s >= 0
    assert choice.seeds == (1 if kind is FLUX else 2)


def test_files_that_nothing_can_score_are_not_compared() -> None:
    plan = planned(ImageModelType.SDXL, 2.0, files=4)
    assert plan.image is not None
    assert plan.image.choice is None


def test_a_file_of_kohya_is_of_a_whole_number_of_epochs() -> None:
    plan = planned(FLUX, 2.0, files=4)
    assert plan.image is not None
    assert plan.steps.save_every == plan.image.save_every_epochs * plan.steps.per_epoch


def test_without_spare_time_there_are_fewer_files_then_none() -> None:
    """A share of the training time may be taken from the steps."""
    five = planned(hours=1.5, files=5, pictures=4)
    assert five.image is not None
    assert five.image.choice is not None
    cost = five.image.choice.seconds
    shown = {}
    for hours in (1.5, 1.1, 1.05, 1.0, 0.92):
        plan = planned(hours=hours, files=5, pictures=4)
        assert plan.image is not None
        shown[hours] = plan.image.choice.files if plan.image.choice else 0
        assert plan.steps.total == planned(hours=hours).steps.total
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    assert len(set(shown.values())) > 2
    assert (shown[1.5], shown[0.92]) == (5, 0)
    taken = planned(hours=0.92, files=5, pictures=4, share=0.4)
    assert taken.image is not None
    assert taken.image.choice is not None
    assert taken.image.choice.seconds == pytest.approx(cost, rel=0.01)
    assert taken.steps.total < planned(hours=0.92).steps.total
    assert taken.time.slack_s >= 0


def test_few_files_to_choose_from_are_not_all_that_a_cut_run_leaves() -> None:
    plan = planned(hours=1.5, files=2, held_out=True)
    assert plan.image is not None
    assert plan.image.choice is not None
    assert (plan.image.choice.files, plan.image.choice.held_out) == (2, True)
    assert plan.steps.save_every == plan.steps.total / 4


def test_a_retry_after_too_little_memory_keeps_the_time_to_choose() -> None:
    plan = planned(FLUX, 2.0, files=4)
    smaller = next_after_oom(plan, OutOfMemory(moment="train", elapsed_s=300))
    assert smaller is not None
    assert smaller.time["choose"] == plan.time["choose"] > 0
    assert [phase.name for phase in smaller.time.phases][-2:] == ["choose", "publish"]


def test_numbers_follow_the_pictures_and_the_steps_the_batch_too() -> None:
    few, many = planned(ImageModelType.QWEN_IMAGE, 3.0, 12), planned(ImageModelType.QWEN_IMAGE, 3.0, 48)
    assert few.steps.total == round(892 * 0.5**0.51)
    assert many.steps.total == round(892 * 2**0.51)
    assert few.adapter is not None
    assert many.adapter is not None
    assert few.adapter.rank < 138 < many.adapter.rank == many.adapter.alpha
    assert few.optimizer.learning_rate > many.optimizer.learning_rate
    assert "at 48 pictures" in many.reasons["adapter.rank"].text
    flux = planned(FLUX, 2.0, 24)
    assert (flux.steps.total, flux.batch.effective) == (128, 8)
