"""A smaller batch where there would be too few steps: a training of fifty steps hardly leaves its warmup."""

from __future__ import annotations

from core.budget import Concession
from core.planning.costs import Site
from core.planning.fit import Fit, fit
from core.planning.wishes import Wish
from core.tasks import TaskType

#: Gradients of fewer sequences are mostly noise.
SMALLEST = 8


def with_steps_enough(wish: Wish, found: Fit, available: int, site: Site) -> tuple[Wish, Fit]:
    """Halves the effective batch until the profile's least number of steps is there."""
    least, asked = wish.targets.least_steps, wish.targets.effective_batch_size
    if least is None or asked is None or found.code is not None or wish.task.task_type is TaskType.GRPO:
        return wish, found
    first = found.best.schedule.total
    while found.best.schedule.total < least:
        smaller = _halved(wish)
        if smaller is None:
            break
        other = fit(smaller, available, site)
        if other.code is not None or other.best.schedule.total <= found.best.schedule.total:
            break
        wish, found = smaller, other
    batch = wish.targets.effective_batch_size
    if batch == asked:
        return wish, found
    reason = f"{first:,} steps of {asked} are too few; targets.least_steps is {least}"
    given = Concession(field="effective_batch_size", wanted=asked, got=batch, reason=reason)
    return wish._replace(concessions=(*wish.concessions, given)), found


def _halved(wish: Wish) -> Wish | None:
    half = (wish.targets.effective_batch_size or 0) // 2
    if half < SMALLEST:
        return None
    targets = wish.targets.model_copy(update={"effective_batch_size": half})
    profile = wish.profile.model_copy(update={"targets": targets})
    return wish._replace(profile=profile, asked_batch=wish.asked_batch or 2 * half)
