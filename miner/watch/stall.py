"""Is it working or is it standing still? A hang says nothing, so only time tells."""

from __future__ import annotations

from core.units import show_seconds
from miner.jobs.times import Pace
from miner.watch.progress import Course

#: What a busy GPU is given: something long is going on that the trainer has no word for.
BUSY_FACTOR = 3.0


def stalled(course: Course, now: float, pace: Pace, gpu_idle: bool | None = None) -> str | None:
    """Why it counts as hung, or None. `gpu_idle`: whether its GPUs do nothing, where somebody can tell."""
    silent = now - max(course.heard_at, course.began_at)
    step_s = course.median_step_s
    if course.stage == "train" and step_s is not None:
        limit = max(pace.stall_min_s, pace.stall_factor * step_s)
        what = f"no step for {show_seconds(silent)}, where one takes {show_seconds(step_s)}"
    else:
        limit = pace.start_limit_s
        what = f"nothing heard for {show_seconds(silent)} in stage {course.stage or 'start'!r}"
    if gpu_idle is False:
        limit *= BUSY_FACTOR
    return what if silent > limit else None
