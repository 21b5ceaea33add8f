"""`profile check` down to the engine's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.engines.dry_run import check_profile_plan, example_inputs
from core.engines.render import render
from core.profile.explain import ProfileFinding, ProfileFindingLevel, check_profile
from core.profile.resolve import load_profile
from tests.core.engines.cases import TEXT_TASKS, image_plan, text_plan
from tests.doubles.each import each

SHIPPED = ("base", "cpu-demo", "cpu-native", "h100-fast", "h100x4", "h100x4-strategy", "h100x8", "steady")


def _errors(name: str, *folders: Path) -> list[ProfileFinding]:
    found = check_profile(load_profile(name, folders), check_profile_plan)
    return [one for one in found if one.level is ProfileFindingLevel.ERROR]


@each("name", SHIPPED)
def test_every_shipped_profile_plans_and_renders_for_every_representative_task(name: str) -> None:
    assert _errors(name) == []


def _written(folder: Path, text: str) -> list[ProfileFinding]:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return check_profile(load_profile("mine", [folder]), check_profile_plan)


def test_a_limit_that_leaves_nothing_is_found(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nlimits: {gpu_memory: 1GB}\n")
    assert any("CUDA context" in one.message for one in found if one.level is ProfileFindingLevel.ERROR)


def test_a_key_that_the_engine_does_not_know_is_found(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nengine_config: {axolotl: {sequence_length: 5}}\n")
    assert any("sequence_length" in one.message for one in found if one.level is ProfileFindingLevel.ERROR)


def test_a_task_that_the_profile_always_refuses_is_a_warning(tmp_path: Path) -> None:
    found = _written(tmp_path, "extends: steady\nhardware: 1xRTX-4090\nlimits: {gpu_memory: 3GB}\n")
    assert any(
        "refused on 1xRTX-4090" in one.message for one in found if one.level is ProfileFindingLevel.WARNING
    )


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_every_text_task_renders_from_the_example_inputs(task: TaskType) -> None:
    rendered = render(text_plan(task), example_inputs(task, "meta-llama/Llama-3.1-8B"))
    assert rendered.config["base_model"] == "/cache/models/meta-llama--Llama-3.1-8B"


@each("kind", list(ImageModelType))
def test_every_image_task_renders_from_the_example_inputs(kind: ImageModelType) -> None:
    assert render(image_plan(kind), example_inputs(TaskType.IMAGE)).files
