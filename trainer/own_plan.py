"""A plan for a run that has none: for the GPUs that are seen here, in the time that is left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from pathlib import Path

from core.budget import Verdict
from core.choices import Engine
from core.data import DatasetFacts
from core.model_facts import facts_from_config
from core.models import ModelFacts
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.costs import Site
from core.planning.planner import plan as make_plan
from core.profile import load_profile, resolve
from core.run_files import RunSpec
from trainer.errors import BadModel, NoGpu
from trainer.machine import machine, unusable_gpus

#: Which profile a run that plans for itself follows, by name or path.
PROFILE_VARIABLE = "GOD_MINER_PROFILE"
PROFILE, PROFILE_CPU = "steady", "cpu-demo"


def model_facts(folder: Path, model_id: str) -> ModelFacts:
    """By the model's own config and the size of its weights: names may be made up in tournaments."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} holds no object")
    return facts_from_config(config, model_id)


def own_plan(
    run: RunSpec, model: ModelFacts, data: DatasetFacts, engines: Collection[Engine] = ()
) -> TrainingPlan:
    """The plan; with `engines` given, for one of those that this image has."""
    hardware = machine(Path(run.work_dir))
    # Not for pictures: their engines have a torch of their own, which may see more than we do.
    if hardware.gpus.is_cpu and run.task_type.is_text and (cards := unusable_gpus()):
        raise NoGpu(f"{', '.join(cards)} cannot be used: look at the driver's version (nvidia-smi)")
    spec = TaskSpec(
        task_type=run.task_type,
        image_type=run.image_type,
        trigger_word=run.trigger_word,
        hours=max(run.deadline_at - time.time(), 0.0) / 3600,
        task_id=run.task_id,
        kl_coefficient=run.kl_coefficient,
    )
    name = os.environ.get(PROFILE_VARIABLE) or (PROFILE_CPU if hardware.gpus.is_cpu else PROFILE)
    profile = resolve(load_profile(name), run.task_type, model)
    if engines and profile.targets.engine not in engines:
        # Flux trains with either image engine, and validators' rules differ on the image that it gets.
        targets = profile.targets.model_copy(update={"engine": next(iter(engines))})
        profile = profile.model_copy(update={"targets": targets})
    # Nobody can be refused here, so what the profile keeps free for a daemon's publishing is training time.
    free = {"reserve": run.deadline_at - run.end_by, "reserve_share": 0.0, "min_epochs": 0.0}
    own = profile.model_copy(update={"limits": profile.limits.model_copy(update=free)})
    site = Site(hardware, model_here=True, publishes=False)
    return at_least_tried(make_plan(spec, model, data, hardware, own, site=site))


def at_least_tried(plan: TrainingPlan) -> TrainingPlan:
    """A plan that expects to fail is followed all the same: the ladder may find what fits, and a training
    that is cut off has submitted something."""
    if plan.verdict.feasible:
        return plan
    total = max(plan.steps.total, 1)
    if plan.image is not None:
        # Text runs grow with the clock while they run; an image engine is begun anew when it proves too slow.
        total = max(plan.steps.wanted or 0, total)
    steps = plan.steps.model_copy(
        update={"total": total, "epochs": max(plan.steps.epochs, total / max(plan.steps.per_epoch, 1))}
    )
    note = f"tried although it does not look feasible: {plan.verdict.reason}"
    update = {"steps": steps, "verdict": Verdict(feasible=True), "notes": (*plan.notes, note)}
    return plan.model_copy(update=update)
