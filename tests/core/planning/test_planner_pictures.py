"""Plans for the picture trainer, which trains in tournaments' containers what evaluators score."""

from __future__ import annotations

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Engine
from core.domain.errors import ConfigError
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType
from core.domain.tournament_rules import BANDS
from core.models.identify import facts_from_name
from core.models.image_families import IMAGE_FAMILIES
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, resolve_profile
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs
from tests.doubles.each import each

SCORED = [kind for kind, record in IMAGE_FAMILIES.items() if record.flow is not None]


def planned(
    kind: ImageModelType, gpus: str = "1xH100", hours: float = 1.0, *, there: bool = True, **changes: object
) -> TrainingPlan:
    """`changes` are the operator's, of the recipe."""
    host, model = Hardware(gpus=parse_gpus(gpus)), facts_from_name("a/model", None, kind)
    profile = resolve_profile(load_profile("steady"), TaskType.IMAGE, model, 20)
    raw = profile.engine_config.model_copy(update={"pictures": changes})
    profile = profile.model_copy(update={"engine_config": raw})
    spec = TaskSpec(task_type=TaskType.IMAGE, hours=hours, image_type=kind)
    data = assumed_facts(TaskType.IMAGE, 20, image_type=kind)
    conditions = JobConditions(host, model_cached=True, publishes=False, pictures=there)
    return plan_task(spec, model, data, host, profile, conditions=conditions)


@each("kind", SCORED)
def test_a_scored_family_is_trained_by_its_own_recipe_at_the_size_at_which_it_is_scored(
    kind: ImageModelType,
) -> None:
    plan, flow = planned(kind, "8xH100"), IMAGE_FAMILIES[kind].flow
    assert flow is not None
    assert plan.image is not None
    assert plan.verdict.feasible
    assert (plan.engine, plan.gpus.count, plan.image.resolutions) == (Engine.PICTURES, 1, (1024,))
    assert plan.adapter is not None
    assert (plan.adapter.rank, plan.optimizer.learning_rate) == (flow.recipe.rank, flow.recipe.rate)
    assert plan.image.twin is flow.twin
    assert plan.steps.per_epoch == 20 * BANDS
    made = render(plan, image_inputs(kind))
    assert made.command[-3:] == ("-m", "trainer.pictures.train", f"{image_inputs(kind).config_dir}/run.json")


def test_without_the_trainer_or_for_sdxl_the_other_engines_train() -> None:
    assert planned(ImageModelType.SDXL).engine is Engine.KOHYA
    other = planned(ImageModelType.KREA2, there=False)
    assert (other.engine, other.image and other.image.recipe) == (Engine.AI_TOOLKIT, None)
    # As it is scored: uniform noise levels, and the empty text half of the time.
    assert (other.targets.timestep_sampling, other.targets.caption_dropout) == ("linear", 0.5)


def test_more_hours_are_more_steps_and_scores_have_their_share() -> None:
    short, long = planned(ImageModelType.KREA2, hours=0.5), planned(ImageModelType.KREA2, hours=1.5)
    assert 0 < short.steps.total < long.steps.total
    assert long.image is not None
    assert long.image.recipe is not None
    share = long.time["evaluate"] / (long.time["evaluate"] + long.time["train"])
    assert share == pytest.approx(long.image.recipe.evaluation_share, abs=0.01)


def test_memory_asks_for_recomputation_first_and_then_for_the_twin() -> None:
    plans = [planned(ImageModelType.QWEN_IMAGE, gpus) for gpus in ("1xH200", "1xH100", "1xA100-40GB")]
    recipes = [plan.image.recipe for plan in plans if plan.image and plan.image.recipe]
    assert [recipe.checkpointing for recipe in recipes] == [False, True, True]
    assert [plan.image and plan.image.twin for plan in plans] == [True, True, False]
    assert [concession.field for concession in plans[-1].concessions] == ["image.twin"]


def test_an_operator_changes_the_recipe() -> None:
    plan = planned(ImageModelType.FLUX, rank=4, rate=1e-4, held_out_share=0.2, checkpointing=True)
    assert plan.image is not None
    recipe = plan.image.recipe
    assert recipe is not None
    assert (recipe.rank, recipe.rate, recipe.held_out_share, recipe.checkpointing) == (4, 1e-4, 0.2, True)
    with pytest.raises(ConfigError, match=r"engine_config\.pictures\.rnk"):
        planned(ImageModelType.FLUX, rnk=4)
