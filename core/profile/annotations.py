"""How a value that today's engines rename, ignore or take badly is talked about: words and questions."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from core.choices import Engine, Method
from core.profile.targets import Targets
from core.tasks import ImageModelType, TaskType


class Effect(StrEnum):
    RENAMED = "renamed"  # the engine has the idea under another name or in another form
    OURS = "done by us"  # no engine has it; our trainer's callbacks do it
    IGNORED = "no effect"  # accepted and without consequence
    DOUBTFUL = "doubtful"  # works, and the evidence speaks against it
    HARMFUL = "harmful"  # breaks the run or the result as it stands


class Case(NamedTuple):
    """For whom an annotation is asked."""

    task_type: TaskType
    image_type: ImageModelType | None
    engine: Engine

    @property
    def is_rl(self) -> bool:
        return self.task_type in (TaskType.DPO, TaskType.GRPO)

    @property
    def words(self) -> str:
        return self.image_type.value if self.image_type else self.task_type.value.removesuffix("Task")


class Annotation(NamedTuple):
    path: str
    effect: Effect
    text: str


class Rule(NamedTuple):
    path: str
    effect: Effect
    applies: Callable[[Targets, Case], bool]
    text: str


KOHYA_TYPES = (ImageModelType.SDXL, ImageModelType.FLUX)


def engine_for(targets: Targets, task_type: TaskType, image_type: ImageModelType | None) -> Engine:
    """The profile's engine where it can do the task, else the one that does."""
    if task_type is not TaskType.IMAGE:
        return targets.engine if targets.engine in (Engine.AXOLOTL, Engine.NATIVE) else Engine.AXOLOTL
    if image_type not in KOHYA_TYPES:
        return Engine.AI_TOOLKIT
    both = image_type is ImageModelType.FLUX and targets.engine is Engine.AI_TOOLKIT
    return Engine.AI_TOOLKIT if both else Engine.KOHYA


def is_text(case: Case) -> bool:
    return case.task_type.is_text


def is_axolotl(case: Case) -> bool:
    return case.engine is Engine.AXOLOTL


def is_kohya(case: Case) -> bool:
    return case.engine is Engine.KOHYA


def is_flux(case: Case) -> bool:
    return case.image_type is ImageModelType.FLUX and is_kohya(case)


def is_lora(targets: Targets) -> bool:
    return targets.method is not Method.FULL


def alpha_times_lr(targets: Targets) -> float:
    """With Adam and alpha/r scaling the first updates go as this product, whatever the rank."""
    return (targets.lora_alpha or 32.0) * targets.learning_rate
