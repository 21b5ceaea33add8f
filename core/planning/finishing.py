"""What follows the last step: a mean of the best states, and training on held-out rows.

Both only of text that is scored on held-out rows, without rewards: a score of sampled completions differs by
chance by more than a mean of states gains, and costs as much as many steps; prompts have no answer to learn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from core.domain.choices import EvalMetric
from core.planning.budget import TimeBreakdown, TimelinePhase
from core.planning.plan import LastStretchPlan, SoupPlan, TrainingPlan
from core.planning.search.requirements import Requirements
from core.planning.time.overheads import PhaseEstimate
from core.planning.time.schedule import RepeatTimes

SOUP_PHASE, STRETCH_PHASE = "soup", "last stretch"
#: Part of the training time that each may take. Seven evaluations of a usual run are two percent of it. A
#: pass over held-out rows is what they are of all rows: a fifth, where data are few.
SOUP_SHARE, STRETCH_SHARE = 0.05, 0.1
#: Of the held-out rows one in so many stays out of the training on them, more where that is too few to judge.
OUT_EVERY, LEAST_OUT = 5, 32


def out_every(rows: int) -> int:
    """One in so many of the held-out rows stays out of the last stretch; 0: they are too few for one."""
    every = min(OUT_EVERY, rows // LEAST_OUT)
    return every if every >= 2 else 0


def soup_plan(needs: Requirements) -> SoupPlan | None:
    if needs.targets.soup_members < 2 or not _scores_rows(needs):
        return None
    return SoupPlan(members=needs.targets.soup_members, share=SOUP_SHARE)


def last_stretch_plan(needs: Requirements, eval_rows: int) -> LastStretchPlan | None:
    """The engine's own loss cannot be told for some of the rows alone."""
    scored = _scores_rows(needs) and needs.targets.eval_metric is EvalMetric.VALIDATOR
    if not needs.targets.last_stretch_rate or not scored or not out_every(eval_rows):
        return None
    return LastStretchPlan(rate=needs.targets.last_stretch_rate, share=STRETCH_SHARE)


def _scores_rows(needs: Requirements) -> bool:
    task = needs.task.task_type
    return task.is_text and not task.generates and needs.eval_rows > 0


def stretch_steps(eval_rows: int, steps_per_epoch: int, training_rows: int) -> int:
    """Steps of one pass over those of the held-out rows that do not stay out."""
    every = out_every(eval_rows)
    if not every:
        return 0
    rows = eval_rows - math.ceil(eval_rows / every)
    return max(math.ceil(rows * steps_per_epoch / max(training_rows, 1)), 1)


def stretch_steps_of(plan: TrainingPlan) -> int:
    rows = plan.steps.eval_rows
    return stretch_steps(rows, plan.steps.per_epoch, plan.data.rows - rows)


def finishing_of(time: TimeBreakdown) -> tuple[TimelinePhase, ...]:
    return tuple(phase for phase in time.phases if phase.name in (SOUP_PHASE, STRETCH_PHASE))


def finishing_phases(
    needs: Requirements, rate: RepeatTimes, steps_per_epoch: int, seconds: float
) -> Iterator[PhaseEstimate]:
    """The longest that each may take, of so many seconds for all the training. In a short one fewer rows may
    be held out than `needs` has."""
    if (soup := soup_plan(needs)) is not None:
        longest = (soup.members - 1) * rate.eval_s + rate.save_s
        why = f"means of the {soup.members} best states, at most {soup.share:.0%}"
        yield PhaseEstimate(SOUP_PHASE, max(min(longest, soup.share * seconds), 0.0), lambda: why)
    if (stretch := last_stretch_plan(needs, needs.eval_rows)) is not None:
        steps = stretch_steps(needs.eval_rows, steps_per_epoch, needs.training_rows)
        longest = steps * rate.step_s + rate.eval_s + rate.save_s
        text = f"{steps:,} steps on held-out rows, at most {stretch.share:.0%}"
        yield PhaseEstimate(STRETCH_PHASE, max(min(longest, stretch.share * seconds), 0.0), lambda: text)
