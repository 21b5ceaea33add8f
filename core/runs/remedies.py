"""Remedies for a training that failed: whether it is tried again, how often, and what is changed before.

The daemon's next attempt follows this table, and so does a container that tries again by itself because no
daemon is there (tournaments): one task is treated alike in both. How often a reason is tried again is its
`RetryRule` in `END_MEANINGS`. Whether the time suffices is asked on each side: the daemon may have an earlier
model to publish, the container has measured how long a start takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from core.domain.choices import Refusal
from core.domain.job_states import END_MEANINGS, EndReason, RetryRule
from core.planning.budget import PlanVerdict
from core.planning.conditions import Workarounds
from core.planning.plan import TrainingPlan
from core.planning.time.schedule import LEAST_SAVES
from core.runs.kernel_failures import KernelKind, kernel_failure, without_kernel
from core.runs.run_files import RunEnd

#: Attempts at one task; `MAX_ATTEMPTS` sets the daemon's. A training that was killed goes on from its last
#: save, so another attempt costs little more than its start.
MAX_ATTEMPTS = 5
#: After a loss that is not a number the next training runs at this part of its learning rate. Half is often
#: still above the edge where a training diverges, and there is one more try only; 0.3 is one step of the
#: search for a rate (√10). A rate three times too low costs a little of the score, one too high all of it.
NAN_RATE_FACTOR = 0.3
#: Steps of the ladder that a task takes after running out of memory. The ladder mostly ends sooner by itself:
#: eight halvings are an estimate that was wrong by a factor of 256. Each step costs a start of minutes: a
#: trainer that takes every failure for this one must not use up the hours of a job.
MAX_OOM_STEPS = 8

#: The reason that a trainer's own end means, where it left no submission.
REASON_OF_RUN_END: dict[RunEnd, EndReason] = {
    RunEnd.FINISHED: EndReason.BAD_SUBMISSION,
    RunEnd.EARLY: EndReason.BAD_SUBMISSION,
    RunEnd.CLOCK: EndReason.STOPPED,
    RunEnd.STOPPED: EndReason.STOPPED,
    RunEnd.OOM: EndReason.OOM,
    RunEnd.NAN: EndReason.NAN,
    RunEnd.BAD_DATA: EndReason.BAD_DATA,
    RunEnd.BAD_MODEL: EndReason.BAD_MODEL,
    RunEnd.BAD_REWARD: EndReason.BAD_REWARD,
    RunEnd.DISK_FULL: EndReason.DISK_FULL,
    RunEnd.HUNG: EndReason.HUNG,
    RunEnd.KILLED: EndReason.KILLED,
    RunEnd.INFEASIBLE: EndReason.INFEASIBLE,
    RunEnd.CRASHED: EndReason.CRASHED,
}
#: Ends after which repeating the attempt would not help.
GOOD_ENDS = frozenset({RunEnd.FINISHED, RunEnd.EARLY, RunEnd.CLOCK})


class AttemptFailure(NamedTuple):
    reason: EndReason
    #: The failure's own message.
    detail: str = ""


def retry_allowed(failures: Sequence[AttemptFailure], max_attempts: int = MAX_ATTEMPTS) -> bool:
    """Return whether another attempt may follow the last of these failures, which are in their order."""
    kinds = [_kind_of(failure) for failure in failures]
    match END_MEANINGS[failures[-1].reason].retry:
        case RetryRule.NO:
            return False
        case RetryRule.LADDER:
            return kinds.count(kinds[-1]) <= MAX_OOM_STEPS
        case RetryRule.ONCE if kinds.count(kinds[-1]) > 1:
            return False
    # A full disk and the steps of the ladder do not use up attempts.
    counted = (RetryRule.AGAIN, RetryRule.ONCE)
    return sum(END_MEANINGS[failure.reason].retry in counted for failure in failures) < max_attempts


def _kind_of(failure: AttemptFailure) -> tuple[EndReason, KernelKind | None]:
    """Return the reason, and the kernel that failed in a crash. A kernel has a remedy, so it leaves any other
    crash its own retry, and gets one after it."""
    failed = kernel_failure(failure.detail) if failure.reason is EndReason.CRASHED else None
    return failure.reason, failed.kind if failed else None


def workarounds_after(plan: TrainingPlan, failure: AttemptFailure) -> Workarounds:
    """Return the plan's workarounds with what this failure adds: mostly nothing. For the GPU's memory see
    `core.planning.oom`."""
    before = plan.conditions.workarounds
    match failure.reason:
        case EndReason.NAN:
            rate = plan.optimizer.learning_rate
            lower = float(f"{rate * NAN_RATE_FACTOR:.6g}")
            note = f"learning_rate {rate:g} → {lower:g}: the loss became NaN"
            return before.adding(note, learning_rate=lower)
        case EndReason.HOST_MEMORY if plan.loader.workers:
            note = f"loader workers {plan.loader.workers} → 0: the host's memory ran out"
            return before.adding(note, loader_workers=0)
        case EndReason.CRASHED:
            return without_kernel(plan, failure.detail) or _without_vllm(plan)
        case EndReason.HUNG:
            return _without_vllm(plan)
    return before


def _without_vllm(plan: TrainingPlan) -> Workarounds:
    """It is not part of the engine and may not suit its version, the model, or the driver."""
    before = plan.conditions.workarounds
    if plan.grpo is None or not plan.grpo.vllm:
        return before
    return before.adding("grpo_vllm: the trainer generates after the failure with vLLM", no_vllm=True)


def can_resume(before: TrainingPlan, after: TrainingPlan, reason: EndReason) -> bool:
    """Return whether a training by the plan `after` can go on from a checkpoint of one by `before`."""
    same_shards = (
        before.batch.world_size == after.batch.world_size
        and (before.fsdp and before.fsdp.within_nodes) == (after.fsdp and after.fsdp.within_nodes)
        and (not (after.fsdp and after.fsdp.within_nodes) or before.gpus.per_node == after.gpus.per_node)
    )
    return (
        reason is not EndReason.NAN  # what was saved may be poisoned already
        and before.engine is after.engine
        and before.method is after.method
        and before.adapter == after.adapter
        and before.parallelism is after.parallelism
        and before.optimizer.name is after.optimizer.name
        and (after.fsdp is None or same_shards)
    )


def forced_feasible(plan: TrainingPlan, at_least: int = 1) -> TrainingPlan:
    """A plan that expects to fail is followed all the same: the ladder may find what fits, and a training
    that is cut off has submitted something. `at_least`: steps that a schedule may count on already."""
    if plan.verdict.feasible:
        return plan
    total = max(plan.steps.total, at_least)
    note = f"tried although it does not look feasible: {plan.verdict.reason}"
    if plan.image is not None:
        # Text runs grow with the clock while they run; an image engine reads its steps once.
        total = max(plan.steps.wanted or 0, total)
        # What was planned for fewer steps, or none, would save far too often.
        longer = plan if total == plan.steps.total else with_image_steps(plan, total)
        image = longer.image
        if image is not None and image.recipe is not None and plan.verdict.code is Refusal.NO_MEMORY:
            recipe = image.recipe.model_copy(update={"checkpointing": True})
            lean = image.model_copy(update={"recipe": recipe, "twin": False})
            longer = longer.model_copy(update={"image": lean})
        return _noted(longer, note, verdict=PlanVerdict(feasible=True))
    steps = plan.steps.model_copy(
        update={"total": total, "epochs": max(plan.steps.epochs, total / max(plan.steps.per_epoch, 1))}
    )
    return _noted(plan, note, steps=steps, verdict=PlanVerdict(feasible=True))


def with_image_steps(plan: TrainingPlan, total: int) -> TrainingPlan:
    """The same training of pictures with another number of steps, and files evenly spread on the way."""
    steps = plan.steps
    epochs = total / max(steps.per_epoch, 1)
    every = max(math.ceil(total / LEAST_SAVES), 1)
    image = plan.image and plan.image.model_copy(
        update={"save_every_epochs": max(math.ceil(epochs / LEAST_SAVES), 1)}
    )
    warmup = min(plan.optimizer.warmup_steps, total // 4)
    keep = max(steps.keep_checkpoints, LEAST_SAVES)
    update = {
        "total": total,
        "epochs": epochs,
        "eval_every": every,
        "save_every": every,
        "keep_checkpoints": keep,
    }
    return plan.model_copy(
        update={
            "steps": steps.model_copy(update=update),
            "image": image,
            "optimizer": plan.optimizer.model_copy(update={"warmup_steps": warmup}),
        }
    )


def _noted(plan: TrainingPlan, note: str, **changes: object) -> TrainingPlan:
    return plan.model_copy(update={**changes, "notes": (*plan.notes, note)})
