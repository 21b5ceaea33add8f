"""`profile check` down to the engine's configuration."""

from __future__ import annotations

from pathlib import Path

from core.domain.tasks import ImageModelType, TaskType
from core.profile.explain import ProfileFindingLevel, check_profile
from core.profile.resolve import load_profile, profile_files
from core.recipes.dry_run import check_profile_plan, example_inputs
from core.recipes.render import render
from tests.core.recipes.cases import TEXT_TASKS, image_plan, text_plan
from tests.doubles.each import each


def _findings(name: str, level: ProfileFindingLevel, *folders: Path) -> str:
    findings = check_profile(load_profile(name, folders), check_profile_plan)
    return "\n".join(finding.message for finding in findings if finding.level is level)


@each("name", sorted(profile_files()))
def test_every_shipped_profile_plans_and_renders_for_every_representative_task(name: str) -> None:
    assert _findings(name, ProfileFindingLevel.ERROR) == ""


@each(
    ("text", "level", "message"),
    [
        ("limits: {gpu_memory: 1GB}", ProfileFindingLevel.ERROR, "CUDA context"),
        ("engine_config: {axolotl: {sequence_length: 5}}", ProfileFindingLevel.ERROR, "sequence_length"),
        (
            "hardware: 1xRTX-4090\nlimits: {gpu_memory: 3GB}",
            ProfileFindingLevel.WARNING,
            "refused on 1xRTX-4090",
        ),
    ],
)
def test_what_a_plan_or_its_rendering_shows_is_found(
    tmp_path: Path, text: str, level: ProfileFindingLevel, message: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"extends: steady\n{text}\n", encoding="utf-8")
    assert message in _findings("mine", level, tmp_path)


@each("task", TEXT_TASKS)
def test_every_text_task_renders_from_the_example_inputs(task: TaskType) -> None:
    rendered = render(text_plan(task), example_inputs(task, "meta-llama/Llama-3.1-8B"))
    assert rendered.config["base_model"] == "/cache/models/meta-llama--Llama-3.1-8B"


@each("kind", list(ImageModelType))
def test_every_image_task_renders_from_the_example_inputs(kind: ImageModelType) -> None:
    assert render(image_plan(kind), example_inputs(TaskType.IMAGE)).files
