"""The plan of an attempt. Apart from the jobs: importing all of a plan takes a quarter of a second."""

from __future__ import annotations

from core.planning.plan import TrainingPlan
from miner.api.base import Answer


class PlannedMemory(Answer):
    estimate_bytes: int
    terms: dict[str, int]
    measured_bytes: int | None


class PlannedSpeed(Answer):
    """Speed of all GPUs together. None: not counted for this kind of task."""

    step_s: float
    samples_s: float
    tokens_s: float | None
    mfu: float | None


class PlanDetails(Answer):
    """The plan of an attempt, beside what was measured."""

    attempt: int
    plan: TrainingPlan
    #: What limits cost, in words.
    concessions: list[str]
    memory: PlannedMemory
    expected: PlannedSpeed | None
