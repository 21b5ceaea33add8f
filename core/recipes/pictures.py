"""The picture trainer's recipe: the plan has it whole, since memory and time follow from it."""

from __future__ import annotations

from core.models.image_families import IMAGE_FAMILIES
from core.planning.plan import TrainingPlan
from core.recipes.base import Recipe, RunInputs, unsupported_target


def pictures_recipe(plan: TrainingPlan, inputs: RunInputs) -> Recipe:
    kind, image = plan.task.image_type, plan.image
    flow = IMAGE_FAMILIES[kind].flow if kind is not None else None
    if flow is None or image is None or image.recipe is None:
        raise unsupported_target(plan.profile.name, "engine", plan.engine, f"does not train {kind}")
    recipe, own = image.recipe.model_dump(mode="json"), flow.recipe.model_dump(mode="json")
    return Recipe(recipe, own, {}, frozenset(plan.engine_config), ())
