"""What is changed after a training that failed: one table for the daemon's next attempt and for a container
that tries again by itself."""

from __future__ import annotations

import re

from core.choices import Attention
from core.plan import TrainingPlan

#: After a loss that is no number the next training runs at this part of its learning rate. Half is often
#: still above the edge where a training diverges, and there is one more try only; 0.3 is one step of the
#: search for a rate (√10). A rate three times too low costs a little of the score, one too high all of it.
CALMER = 0.3
#: Rungs that a job climbs down after running out of memory. The ladder mostly ends sooner by itself: eight
#: halvings are an estimate that was wrong by a factor of 256. Each rung costs a start of minutes: a
#: trainer that takes every failure for this one must not use up the hours of a job.
MOST_OOM = 8


def calmer(plan: TrainingPlan, times: int = 1) -> TrainingPlan:
    """The same plan after so many losses that were no number."""
    rate = float(f"{plan.optimizer.learning_rate * CALMER**times:.6g}")
    return plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"learning_rate": rate})})


_FLASH = r"(?:flash[ _-]?att|flash_(?:fwd|bwd))"
#: How a kernel of flash attention fails once it is used: made for other GPUs, for another torch or libc, not
#: there. What a model refuses while it is loaded is met there (`trainer.loading`).
_NO_KERNEL = re.compile(
    rf"{_FLASH}.{{0,60}} (?:only supports?|requires)\b|{_FLASH}.*undefined symbol|undefined symbol.*{_FLASH}"
    rf"|No module named '?flash_attn|GLIBC\S* not found.*{_FLASH}",
    re.IGNORECASE,
)
#: Any kernel's failure: flash attention's where it is named beside it.
_NO_IMAGE = re.compile("no kernel image is available", re.IGNORECASE)


def without_flash(plan: TrainingPlan, failure: str) -> TrainingPlan | None:
    """The same plan with torch's own attention, where the failure is a kernel's that this machine lacks."""
    used = plan.precision.attention
    named = re.search(_FLASH, failure, re.IGNORECASE) is not None
    said = next(
        (
            line
            for line in failure.splitlines()
            if _NO_KERNEL.search(line) or (named and _NO_IMAGE.search(line))
        ),
        None,
    )
    if said is None or used in (Attention.SDPA, Attention.EAGER):
        return None
    precision = plan.precision.model_copy(update={"attention": Attention.SDPA})
    note = f"attention {used} → {Attention.SDPA}: {said.strip()[:200]}"
    return plan.model_copy(update={"precision": precision, "notes": (*plan.notes, note)})
