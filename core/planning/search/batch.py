"""The effective batch, changed after the search where that trains more.

A run that would have too few steps to leave its warmup gets a smaller one, a GRPO run that would leave GPUs
idle a larger one: a GPU generates hundreds of completions in little more time than it needs for a few. The
batch is doubled while that trains more per second. With a gradient of batch B a step gets as far as
B / (B + critical batch) of one without noise (McCandlish et al., arXiv 1812.06162).
"""

from __future__ import annotations

from core.domain.hardware import Device
from core.planning.budget import conceded
from core.planning.search.fit import SearchResult, best_fit
from core.planning.search.requirements import Requirements
from core.planning.search.timed_candidate import TimedCandidate

#: Completions at which half of a step's gradient is noise. No measurement for rewards is published: this is
#: between two batches in use, the text tournament winner's 160 and DeepSeekMath's 1,024.
CRITICAL_BATCH = 512


#: Gradients of fewer sequences are mostly noise.
SMALLEST_BATCH = 8


def with_enough_steps(
    needs: Requirements, result: SearchResult, available: int
) -> tuple[Requirements, SearchResult]:
    """Halve the effective batch until the run has the profile's `least_steps`."""
    least = needs.targets.least_steps
    if least is None or result.code is not None or not needs.task.task_type.is_text:
        return needs, result
    first, asked = result.best.schedule.total, needs.effective(result.best.candidate.world)
    while result.best.schedule.total < least:
        smaller = _halved(needs, result.best.candidate.world)
        if smaller is None:
            break
        other = best_fit(smaller, available)
        if other.code is not None or other.best.schedule.total <= result.best.schedule.total:
            break
        needs, result = smaller, other
    if needs.asked_batch is None:
        return needs, result
    batch = needs.targets.effective_batch_size
    reason = f"{first:,} steps of {asked} are too few; targets.least_steps is {least}"
    concession = conceded("effective_batch_size", asked, batch, reason)
    return needs._replace(concessions=(*needs.concessions, concession)), result


def with_larger_steps(
    needs: Requirements, result: SearchResult, available: int
) -> tuple[Requirements, SearchResult]:
    """Double the effective batch, up to the profile's `grpo_most_batch`, while that trains more. The learning
    rate stays: published ones belong to such batches. CPUs are left out: their generation speed is a guess.
    """
    most, first = needs.targets.grpo_most_batch, result.best
    if most is None or needs.learned.batch is not None or needs.kind.device is not Device.CUDA:
        return needs, result
    asked = needs.effective(first.candidate.world)
    while result.code is None and 2 * result.best.candidate.effective <= most:
        larger = _of_batch(needs, 2 * result.best.candidate.effective)
        other = best_fit(larger, available)
        if not _trains_more(needs, other, result.best):
            break
        needs, result = larger, other
    best = result.best
    if best is first:
        return needs, result
    reason = (
        f"{best.candidate.effective} completions take {best.rate.step_s:.3g} s, {first.candidate.effective} "
        f"{first.rate.step_s:.3g} s; targets.grpo_most_batch is {most}"
    )
    concession = conceded("effective_batch_size", asked, best.candidate.effective, reason)
    return needs._replace(concessions=(*needs.concessions, concession)), result


def _halved(needs: Requirements, world: int) -> Requirements | None:
    half = needs.effective(world) // 2
    if half < SMALLEST_BATCH:
        return None
    return _of_batch(needs, half)._replace(asked_batch=needs.asked_batch or 2 * half)


def _of_batch(needs: Requirements, batch: int) -> Requirements:
    targets = needs.targets.model_copy(update={"effective_batch_size": batch})
    return needs._replace(profile=needs.profile.model_copy(update={"targets": targets}))


def _trains_more(needs: Requirements, other: SearchResult, best: TimedCandidate) -> bool:
    """Return True if steps this large are worth their time. They are not if the prompts run out before the
    hours do; so neither more hours nor more prompts make the training smaller."""
    if other.code is not None or other.best.cost > best.cost or best.schedule.complete:
        return False
    enough = other.best.schedule.total >= (needs.targets.least_steps or 1)
    return enough and _progress(other.best) > _progress(best)


def _progress(timed: TimedCandidate) -> float:
    """Return progress per second, in steps without noise."""
    batch = timed.candidate.effective
    return batch / (batch + CRITICAL_BATCH) / timed.rate.step_s
