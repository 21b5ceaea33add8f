"""Tasks that no planning can help: nothing is known, nothing is there, or nobody means it."""

from __future__ import annotations

from core.budget import Refusal
from core.data import DatasetFacts
from core.facts import Confidence
from core.hardware import Hardware
from core.models import ModelFacts
from core.plan_parts import TaskSpec
from core.profile.targets import Limits
from core.units import show_params

#: The largest published model has a trillion or two; a count beyond this is a slip or a joke.
MOST_PARAMS = 5 * 10**12
Refused = tuple[Refusal, str]


def refusal(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    hardware: Hardware,
    limits: Limits,
    stated: int | None = None,
) -> Refused | None:
    """The first reason that settles it, or None. `stated` is the count that someone gave, believed or not."""
    found = _model(model, stated) or _task(task, data)
    if found is None and hardware.gpus.count < limits.min_gpus:
        found = Refusal.NO_GPU, f"{hardware.gpus} is there; limits.min_gpus is {limits.min_gpus}"
    if found is None and limits.min_gpus > limits.max_gpus:
        why = f"limits.min_gpus {limits.min_gpus} is above limits.max_gpus {limits.max_gpus}"
        found = Refusal.IMPOSSIBLE_LIMIT, why
    return found


def _model(model: ModelFacts, stated: int | None) -> Refused | None:
    said = max(model.params_total, 0 if model.is_image else stated or 0)
    if said > MOST_PARAMS:
        return Refusal.ABSURD_SIZE, (
            f"{model.model_id or 'the model'} is said to have {show_params(said)} parameters; "
            f"no model has more than {show_params(MOST_PARAMS)}"
        )
    unknown = model.sources.get("params_total") is Confidence.GUESS
    if model.params_total < 1 or unknown:
        return Refusal.UNKNOWN_SIZE, (
            f"nothing tells how large {model.model_id or 'the model'} is: no config, no parameter count, "
            f"no size in its name"
        )
    return None


def _task(task: TaskSpec, data: DatasetFacts) -> Refused | None:
    if task.hours <= 0:
        return Refusal.NO_TIME, f"{task.hours:g} hours leave no time at all"
    if data.rows < 1:
        return Refusal.EMPTY_DATASET, "the dataset has no rows"
    return None
