"""`profile check`, down to the rendered configuration: plan a subject, render it, validate it."""

from __future__ import annotations

from collections.abc import Iterator

from core.budget import Refusal
from core.data_facts import assumed_facts
from core.errors import ConfigError
from core.hardware import Hardware, parse_gpus
from core.model_facts import facts_from_name
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.planner import plan
from core.profile.explain import Finding, Level, Subject
from core.profile.schema import ResolvedProfile
from core.recipes.examples import example_inputs
from core.recipes.render import render

#: Long enough that only a mistake in the profile makes a plan impossible.
HOURS = 24.0
#: Where a profile does not say what it is made for.
HARDWARE = "4xH100"
#: What a CPU is given to train.
TOY_PARAMS = 20_000_000
#: Refusals that are the profile's own doing.
OWN = (Refusal.IMPOSSIBLE_LIMIT, Refusal.NO_GPU, Refusal.NO_ENGINE)


def plan_check(profile: ResolvedProfile, about: Subject) -> Iterator[Finding]:
    """What is wrong with the plan of this subject, or with the configuration made from it."""
    hardware = Hardware(gpus=parse_gpus(profile.hardware or HARDWARE))
    image = about.model.image.image_type if about.model.image else None
    model = about.model
    if hardware.gpus.is_cpu:
        # Demonstrations train toys: no published model fits beside them.
        model = model if image else facts_from_name("a-toy", TOY_PARAMS)
    task = TaskSpec(task_type=about.task_type, hours=HOURS, image_type=image)
    data = assumed_facts(about.task_type, None, 2, image)
    found = plan(task, model, data, hardware, profile, explained=False)
    if found.verdict.code in OWN:
        yield Finding(Level.ERROR, about.words, found.verdict.reason)
    elif not found.verdict.feasible and not hardware.gpus.is_cpu:
        yield Finding(Level.WARNING, about.words, f"refused on {hardware.gpus}: {found.verdict.reason}")
    elif found.verdict.feasible:
        yield from _rendered(found, about)


def _rendered(found: TrainingPlan, about: Subject) -> Iterator[Finding]:
    try:
        render(found, example_inputs(about.task_type))
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(Level.ERROR, about.words, str(problem))
