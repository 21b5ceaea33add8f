"""What to change before a failed training is tried again, and whether that is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.plan import TrainingPlan
from core.planning.oom import OutOfMemory, next_after_oom
from core.remedies import MOST_OOM, calmer, without_flash
from core.run_files import RunEnd
from core.units import show_seconds
from trainer.own_plan import at_least_tried

#: What must be left for another try: the time that the last one took to begin, this many times over.
WORTH = 2.0


@dataclass(frozen=True)
class Failed:
    """How a launch failed, as far as the choice of a remedy cares."""

    end: RunEnd
    moment: str | None
    #: From the launch to the first step, or to the failure where there was none.
    start_s: float
    #: From now to the end of the last save.
    left_s: float
    #: What the failure said of itself, and its stack.
    detail: str = ""


@dataclass(frozen=True)
class Remedy:
    after: RunEnd
    plan: TrainingPlan
    #: Whether the last checkpoint is a place to go on from.
    resumes: bool
    what: str

    def __str__(self) -> str:
        return f"after {self.after}: {self.what}"


def remedy_for(plan: TrainingPlan, failed: Failed, earlier: Sequence[Remedy]) -> Remedy | None:
    """None: nothing helps, or nothing would be over in time."""
    if failed.left_s < WORTH * failed.start_s:
        return None
    tried = [one.after for one in earlier]
    match failed.end:
        case RunEnd.OOM if tried.count(RunEnd.OOM) < MOST_OOM:
            return _smaller(plan, failed)
        case RunEnd.NAN if RunEnd.NAN not in tried:
            return _calmer(plan)
        case RunEnd.CRASHED if changed := without_flash(plan, failed.detail):
            return Remedy(RunEnd.CRASHED, changed, True, changed.notes[-1])
        case RunEnd.CRASHED | RunEnd.HUNG | RunEnd.KILLED if failed.end not in tried:
            return Remedy(failed.end, plan, True, f"once more, {show_seconds(failed.left_s)} are left")
        case _:
            return None


def _smaller(plan: TrainingPlan, failed: Failed) -> Remedy | None:
    failure = OutOfMemory(moment=failed.moment or "train", elapsed_s=max(elapsed(plan, failed.left_s), 0.0))
    smaller = next_after_oom(plan, failure)
    if smaller is None:
        return None
    # Time was looked at above, as it is; the planner's count of it is a guess.
    smaller = at_least_tried(smaller)
    # A checkpoint of other sequences is as good; one of another number of shards is not readable.
    resumes = smaller.batch.world_size == plan.batch.world_size
    return Remedy(RunEnd.OOM, smaller, resumes, smaller.oom_steps[-1])


def elapsed(plan: TrainingPlan, left_s: float) -> float:
    """Seconds since the plan was made, by its own count: it ends at the deadline less the reserve."""
    return plan.time.deadline_s - plan.time.reserve_s - left_s


def _calmer(plan: TrainingPlan) -> Remedy:
    changed = calmer(plan)
    rates = f"{plan.optimizer.learning_rate:g} → {changed.optimizer.learning_rate:g}"
    return Remedy(RunEnd.NAN, changed, False, f"learning rate {rates}")
