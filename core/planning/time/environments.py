"""How long the rows of an environment task are made, before its training."""

from __future__ import annotations

import math

from core.domain.units import show_seconds
from core.models.facts import ModelFacts
from core.planning.plan import TaskSpec
from core.planning.time.overheads import JobConditions, PhaseEstimate

#: Up to so many parameters, so much of the time: a larger model trains on fewer rows in the rest of it. As an
#: entry of 2026-09 has it.
ROWS_TIME: tuple[tuple[float, float], ...] = ((2e9, 0.25), (4e9, 0.20), (6e9, 0.15), (math.inf, 0.12))


def making_rows_share(params: int) -> float:
    return next(share for most, share in ROWS_TIME if params < most)


def making_rows_phases(task: TaskSpec, model: ModelFacts, conditions: JobConditions) -> list[PhaseEstimate]:
    """None for a task with rows of its own, or where they are made already."""
    if not task.task_type.makes_rows or conditions.rows_made:
        return []
    share, cores = making_rows_share(model.params_total), conditions.hardware.cpu_cores
    seconds = share * task.hours * 3600
    why = f"rows are made for {show_seconds(seconds)} at most, {share:.0%} of the time, on {cores} cores"
    return [PhaseEstimate("generate", seconds, lambda: why)]
