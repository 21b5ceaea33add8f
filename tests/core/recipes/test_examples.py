"""A rendering where there is no task yet."""

from __future__ import annotations

import pytest

from core.recipes.examples import example_inputs
from core.recipes.render import render
from core.tasks import ImageModelType, TaskType
from tests.core.recipes.cases import TEXT_TASKS, image_plan, text_plan
from tests.doubles.each import each


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_every_text_task_renders_without_one(task: TaskType) -> None:
    rendered = render(text_plan(task), example_inputs(task, "meta-llama/Llama-3.1-8B"))
    assert rendered.config["base_model"] == "/cache/models/meta-llama--Llama-3.1-8B"


@each("kind", list(ImageModelType))
def test_every_image_task_renders_without_one(kind: ImageModelType) -> None:
    assert render(image_plan(kind), example_inputs(TaskType.IMAGE)).files
