"""How many GPUs a job gets: the profile's strategy, and what to try when that many will not do."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from core.choices import Engine, GpuStrategy
from core.models import ModelFacts
from core.planning.wishes import Wish
from core.profile.targets import Lane, Targets
from core.tasks import TaskType

#: Counts that are ever tried; beyond eight a host's worth at a time.
COUNTS = (*range(1, 9), 12, 16, 24, 32, 48, 64)
#: The validators' own rule: (effective billions up to, GPUs).
TOURNAMENT_STEPS: tuple[tuple[float, int], ...] = ((4e9, 1), (12e9, 2), (40e9, 4), (float("inf"), 8))


class Choice(NamedTuple):
    """Counts in the order in which they are tried, and why the first is the first."""

    counts: tuple[int, ...]
    why: str
    #: The first that reaches the whole wish, else the one that trains most; not simply the first that fits.
    by_time: bool
    #: What the strategy alone would give, however many are there.
    wished: int
    #: These GPUs are set aside for the task: give up quality before taking others.
    stays: bool = False


def choose_counts(wish: Wish, available: int) -> Choice:
    """Every count that is there and allowed, the strategy's first, then larger ones, then smaller ones."""
    limits, strategy = wish.limits, wish.targets.gpu_strategy
    most = min(available, limits.max_gpus)
    if wish.engine is Engine.AI_TOOLKIT:
        # Its ranks do not share the data out: each trains on all of it.
        return Choice((1,), "ai-toolkit trains on one GPU", False, 1)
    if strategy is GpuStrategy.AUTO:
        allowed = _allowed(limits.min_gpus, most)
        return Choice(allowed, "the fewest that fit in memory and time", True, allowed[0])
    wished, why = _by_strategy(wish, strategy, most)
    counts = _around(limits.min_gpus, most, wished)
    return Choice(counts, why, False, wished, strategy is GpuStrategy.LANES)


def _allowed(least: int, most: int) -> tuple[int, ...]:
    return tuple(count for count in COUNTS if least <= count <= most) or (most,)


@lru_cache
def _around(least: int, most: int, wished: int) -> tuple[int, ...]:
    allowed = _allowed(least, most)
    first = max((count for count in allowed if count <= wished), default=allowed[0])
    larger = [count for count in allowed if count > first]
    smaller = [count for count in reversed(allowed) if count < first]
    return first, *larger, *smaller


def _by_strategy(wish: Wish, strategy: GpuStrategy, most: int) -> tuple[int, str]:
    if strategy is GpuStrategy.BY_SIZE:
        return by_size(wish.targets, wish.model)
    if strategy is GpuStrategy.TOURNAMENT:
        return tournament(wish.model, wish.task.task_type, bool(wish.task.kl_coefficient))
    if strategy is GpuStrategy.LANES and (found := lane_for(wish.targets, wish.model, wish.task.task_type)):
        name, lane = found
        return lane.gpus_per_job or len(lane.gpus), f"lane {name}"
    if strategy is GpuStrategy.LANES:
        return most, "no lane is for this task: all of them"
    return most, "one job on all of them"


def by_size(targets: Targets, model: ModelFacts) -> tuple[int, str]:
    """Seed 001: the largest step that the model exceeds."""
    exceeded = [step for step in targets.gpus_by_size if model.params_total > step.above]
    if not exceeded:
        return 1, "by size: below every step"
    step = max(exceeded, key=lambda one: one.above)
    return step.gpus, f"by size: above {step.above / 1e9:g}B"


def tournament(model: ModelFacts, task_type: TaskType, kl: bool) -> tuple[int, str]:
    """As validators hand out machines: parameters, three times for DPO, twice for GRPO or a KL term."""
    if model.is_image:
        return 1, "tournament: pictures get one"
    factor = {TaskType.DPO: 3, TaskType.GRPO: 2}.get(task_type, 1) * (2 if kl else 1)
    size = factor * model.params_total
    count = next(gpus for most, gpus in TOURNAMENT_STEPS if size <= most)
    return count, f"tournament: effective size {size / 1e9:.1f}B"


def lane_for(targets: Targets, model: ModelFacts, task_type: TaskType) -> tuple[str, Lane] | None:
    """Seed 002: the first lane that is for such a job."""
    for name, lane in targets.lanes.items():
        image = model.image.image_type if model.image else None
        if lane.size is not None and (model.is_image or model.params_total not in lane.size):
            continue
        if lane.task is not None and task_type not in lane.task:
            continue
        if lane.image is not None and image not in lane.image:
            continue
        return name, lane
    return None
