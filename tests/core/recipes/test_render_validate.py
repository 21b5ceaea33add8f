"""The one check of all engines, on whole configurations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.choices import Engine
from core.domain.tasks import ImageModelType, TaskType
from core.recipes.render import render, validate
from core.recipes.schema import engine_table
from tests.core.recipes.cases import image_inputs, image_plan, inputs, text_plan
from tests.doubles.each import each

CHECKED = (Engine.AXOLOTL, Engine.KOHYA, Engine.AI_TOOLKIT)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(list("ab")), inner)
    ),
    max_leaves=8,
)


def keys_of(engine: Engine) -> list[str]:
    facts = engine_table(engine).facts
    roots = [facts["root"]] if "root" in facts else list(facts["roots"].values())
    return sorted({key for root in roots for key in engine_table(engine).objects[root]})


@given(st.data(), st.sampled_from(CHECKED), st.integers(1, 8), st.booleans())
def test_no_configuration_ends_in_a_traceback(
    data: st.DataObject, engine: Engine, gpus: int, flux: bool
) -> None:
    config = data.draw(st.dictionaries(st.sampled_from(keys_of(engine)) | st.text(max_size=8), json_values))
    assert all(str(problem) for problem in validate(engine, config, gpus=gpus, flux=flux))


@given(st.data())
def test_one_wrong_value_in_a_good_configuration_never_ends_in_a_traceback(data: st.DataObject) -> None:
    task = data.draw(st.sampled_from([TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO]))
    config = dict(render(text_plan(task), inputs(task)).config)
    config[data.draw(st.sampled_from(sorted(config)))] = data.draw(json_values)
    assert all(str(problem) for problem in validate(Engine.AXOLOTL, config, gpus=4))


@each("engine", CHECKED)
def test_an_empty_configuration_is_a_problem(engine: Engine) -> None:
    assert validate(engine, {}, gpus=1) != []


def test_the_native_trainer_has_no_configuration_to_check() -> None:
    with pytest.raises(ValueError, match="native"):
        validate(Engine.NATIVE, {}, gpus=1)


@each(
    "secret",
    [
        {"wandb_name": "hf_" + "A" * 34},
        {"comet_api_key": "x"},
        {"lr_scheduler_kwargs": {"token": "x"}},
        {"plugins": ["hf_" + "b" * 30]},
    ],
)
def test_a_secret_is_found_and_not_repeated(secret: dict[str, Any]) -> None:
    config = {**render(text_plan(TaskType.INSTRUCT), inputs()).config, **secret}
    problems = [str(problem) for problem in validate(Engine.AXOLOTL, config, gpus=4)]
    (about_secret,) = [text for text in problems if "secret" in text]
    assert "hf_" not in about_secret


def test_an_empty_secret_is_accepted() -> None:
    kind = ImageModelType.SDXL
    config = {**render(image_plan(kind), image_inputs(kind)).config, "wandb_api_key": ""}
    assert validate(Engine.KOHYA, config, gpus=1) == []
