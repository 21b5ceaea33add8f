"""Number of GPUs of a job: the profile's strategy, and what to try when that count does not fit."""

from __future__ import annotations

from typing import NamedTuple

from core.domain.choices import Engine, GpuStrategy
from core.domain.selectors import Lane
from core.domain.tasks import TaskType
from core.domain.tournament_rules import KL_FACTOR, gpus_for
from core.models.facts import ModelFacts
from core.planning.search.requirements import Requirements
from core.profile.targets import Targets


class GpuCountChoice(NamedTuple):
    """Counts in the order in which they are tried, and why the first is the first."""

    counts: tuple[int, ...]
    why: str
    #: Take the first that meets the requirements in full, else the one that trains most; not simply the
    #: first that fits.
    by_time: bool
    #: What the strategy alone would give, however many are there.
    wanted: int
    #: These GPUs are reserved for such tasks: give up quality before taking others.
    fixed: bool = False
    #: Take the number whose training is worth most.
    by_value: bool = False


def choose_counts(needs: Requirements, available: int) -> GpuCountChoice:
    """Every available and allowed count: the strategy's first, then larger ones, then smaller ones."""
    limits, strategy = needs.limits, needs.targets.gpu_strategy
    node = min(needs.node_gpus, available)
    most = min(available, limits.max_gpus)
    if most > node:
        most -= most % node
    if needs.engine is Engine.AI_TOOLKIT:
        # Its ranks do not split the data: each trains on all of it.
        return GpuCountChoice((1,), "ai-toolkit trains on one GPU", False, 1)
    if strategy is GpuStrategy.AUTO:
        allowed = _allowed(limits.min_gpus, most, node)
        return GpuCountChoice(allowed, "the fewest that fit in memory and time", True, allowed[0])
    if strategy is GpuStrategy.BY_VALUE:
        allowed = _allowed(limits.min_gpus, most, node)
        price = max(needs.conditions.worth.prices[: max(allowed)], default=0.0)
        why = (
            f"others would bring up to {price:.2g} points in a GPU's hour" if price else "no other task waits"
        )
        return GpuCountChoice(allowed, f"by value: {why}", False, allowed[0], by_value=True)
    wanted, why = _by_strategy(needs, strategy, most)
    counts = _around(_allowed(limits.min_gpus, most, node, wanted), wanted)
    return GpuCountChoice(counts, why, False, wanted, strategy is GpuStrategy.LANES)


def usable_gpus(needs: Requirements) -> int:
    """Return the number of GPUs that the profile's nodes have."""
    return needs.conditions.hardware.gpus.in_nodes(needs.most_nodes).count


def node_counts(node: int) -> list[int]:
    """Return the divisors of `node`, and powers of two. Three of four would leave a card that no such job can
    use, and steps of 33 rows in place of 32."""
    return [count for count in range(1, node + 1) if node % count == 0 or count & (count - 1) == 0]


def _allowed(least: int, most: int, node: int, wanted: int = 1) -> tuple[int, ...]:
    """Return counts that divide a node, and `wanted` and `most`, which a profile names; several nodes are
    taken whole."""
    within = sorted({*node_counts(node), *(count for count in (wanted, most) if count < node)})
    counts = (*within, *range(2 * node, most + 1, node))
    return tuple(count for count in counts if least <= count <= most) or (most,)


def _around(allowed: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    first = max((count for count in allowed if count <= wanted), default=allowed[0])
    larger = [count for count in allowed if count > first]
    smaller = [count for count in reversed(allowed) if count < first]
    return first, *larger, *smaller


def _by_strategy(needs: Requirements, strategy: GpuStrategy, most: int) -> tuple[int, str]:
    if strategy is GpuStrategy.BY_SIZE:
        return count_by_size(needs.targets, needs.model)
    if strategy is GpuStrategy.TOURNAMENT:
        return tournament_count(needs.model, needs.task.task_type, bool(needs.task.kl_coefficient))
    if strategy is GpuStrategy.LANES and (
        match := lane_for(needs.targets, needs.model, needs.task.task_type)
    ):
        name, lane = match
        return lane.gpus_per_job or len(lane.gpus), f"lane {name}"
    if strategy is GpuStrategy.LANES:
        return most, "no lane is for this task: all of them"
    return most, "one job on all of them"


def count_by_size(targets: Targets, model: ModelFacts) -> tuple[int, str]:
    """The GPUs of the largest step that the model exceeds (seed 001), and why."""
    exceeded = [step for step in targets.gpus_by_size if model.params_total > step.above]
    if not exceeded:
        return 1, "by size: below every step"
    step = max(exceeded, key=lambda step: step.above)
    return step.gpus, f"by size: above {step.above / 1e9:g}B"


def tournament_count(model: ModelFacts, task_type: TaskType, kl: bool) -> tuple[int, str]:
    """Count as validators hand out machines: parameters, three times for DPO, twice for GRPO or a KL term."""
    count = gpus_for(task_type, model.params_total, kl=kl)
    if model.is_image:
        return count, "tournament: images get one"
    if task_type.makes_rows:
        return count, f"tournament: environments get {count}"
    size = task_type.traits.size_factor * (KL_FACTOR if kl else 1) * model.params_total
    return count, f"tournament: effective size {size / 1e9:.1f}B"


def lane_for(targets: Targets, model: ModelFacts, task_type: TaskType) -> tuple[str, Lane] | None:
    """The first lane for such a job (seed 002)."""
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
