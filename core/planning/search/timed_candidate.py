"""The largest training that the time allows, of one candidate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from core.domain.choices import Engine
from core.planning.candidate import RunCandidate, vary
from core.planning.measured import measured_slowness
from core.planning.memory.peak import evaluation_fits, peak_bytes
from core.planning.search.requirements import Requirements, lr_search
from core.planning.time.overheads import (
    PhaseEstimate,
    checkpoint_space,
    making_rows_phases,
    opening_phases,
    publish_phase,
)
from core.planning.time.schedule import (
    RepeatTimes,
    StepSchedule,
    fit_schedule,
    picture_schedule,
    repeat_times,
)
from core.planning.time.sequences import Sequences
from core.planning.time.speed import StepTime
from core.profile.limits import ProfileLimits

#: Sequences in one evaluation batch, at most: the metric is computed row by row anyway.
MOST_EVAL_MICRO = 16


class TimedCandidate(NamedTuple):
    """A candidate with its schedule."""

    #: The candidate before anything was given up.
    required: RunCandidate
    candidate: RunCandidate
    #: How far down the list of lossy variations it lies; 0 for a lossless one.
    cost: int
    seq: Sequences
    rate: RepeatTimes
    step: StepTime
    before: tuple[PhaseEstimate, ...]
    after: PhaseEstimate
    schedule: StepSchedule
    deadline_s: float
    reserve_s: float

    @property
    def total_s(self) -> float:
        return sum([phase.seconds for phase in self.phases])

    @property
    def share(self) -> float:
        """Share of the requested training that is done."""
        wanted = self.schedule.wanted or self.schedule.total
        return min(self.schedule.total / wanted, 1.0) if wanted else 0.0

    @property
    def phases(self) -> Iterator[PhaseEstimate]:
        """From now to the end. Evaluations and checkpoints are sums, not moments."""
        schedule, rate = self.schedule, self.rate
        yield from self.before
        yield PhaseEstimate(
            "train",
            schedule.train_s,
            lambda: f"{schedule.total:,} steps of {rate.step_s:.3g} s, {schedule.epochs:.3g} epochs",
        )
        if schedule.eval_s:
            yield PhaseEstimate("evaluate", schedule.eval_s, self._evaluations)
        yield PhaseEstimate("save", schedule.save_s, self._saves)
        yield self.after

    def _evaluations(self) -> str:
        if self.candidate.engine is Engine.PICTURES:
            return "held-out pictures, by the evaluator's measure"
        return f"every {self.schedule.eval_every} steps, {self.schedule.eval_rows} rows"

    def _saves(self) -> str:
        if self.candidate.engine is Engine.PICTURES:
            return "each better candidate"
        return f"every {self.schedule.save_every} steps"


def reserve_of(limits: ProfileLimits, deadline_s: float) -> float:
    return max(limits.reserve, limits.reserve_share * deadline_s)


def with_time(
    needs: Requirements,
    required: RunCandidate,
    candidate: RunCandidate,
    cost: int,
    budget: int,
) -> TimedCandidate:
    """Fit the largest training into the time: for DPO with the reference's pass where it costs least,
    compiled where that is won back."""
    ways = [candidate]
    if candidate.task.has_pairs:
        other = vary(candidate, reference_ready=not candidate.reference_ready)
        ways += [] if candidate.full and peak_bytes(other) > budget else [other]
    if candidate.compile_mode is not None and not _compiles_anyway(candidate):
        ways += [vary(way, compile_mode=None) for way in ways]
    ways = [_with_eval_batch(needs, _with_master(way, budget), budget) for way in ways]
    timed = (_timed(needs, required, way, cost) for way in ways)
    return max(timed, key=_training_then_time)


def _compiles_anyway(candidate: RunCandidate) -> bool:
    """Return True for Axolotl's fp8, which without compilation is several times slower than bf16."""
    return candidate.engine is Engine.AXOLOTL and candidate.fp8


def _training_then_time(timed: TimedCandidate) -> tuple[float, float]:
    busy = sum(phase.seconds for phase in timed.before) + timed.schedule.train_s
    return timed.schedule.epochs, -busy


def _timed(needs: Requirements, required: RunCandidate, candidate: RunCandidate, cost: int) -> TimedCandidate:
    seq = needs.sequences(candidate)
    deadline = needs.task.hours * 3600
    reserve = reserve_of(needs.limits, deadline)
    conditions = needs.conditions
    making = making_rows_phases(needs.task, needs.model, conditions)
    before = (*making, *opening_phases(candidate, seq, needs.model, needs.data, conditions))
    after = publish_phase(candidate, conditions)
    seconds = deadline - reserve - after.seconds - sum(phase.seconds for phase in before)
    if search := _lr_search_phase(needs, seconds):
        before, seconds = (*before, search), seconds - search.seconds
    slowness = measured_slowness(candidate) * conditions.slowness * conditions.learned.slowness
    rate, step = repeat_times(candidate, seq, needs.eval_rows, slowness)
    disk = checkpoint_space(candidate, needs.model, conditions)
    targets, limits = needs.targets, needs.limits
    if needs.recipe is not None:
        schedule = picture_schedule(candidate, seq, rate, seconds, needs.recipe)
    else:
        schedule = fit_schedule(candidate, seq, rate, needs.eval_rows, seconds, targets, limits, disk)
    return TimedCandidate(
        required=required,
        candidate=candidate,
        cost=cost,
        seq=seq,
        rate=rate,
        step=step,
        before=before,
        after=after,
        schedule=schedule,
        deadline_s=deadline,
        reserve_s=reserve,
    )


def _lr_search_phase(needs: Requirements, seconds: float) -> PhaseEstimate | None:
    """The longest that the search for a learning rate may take."""
    search = lr_search(needs)
    if search is None or seconds <= 0:
        return None
    why = f"at most {search.share:.0%}: short trainings at other learning rates"
    return PhaseEstimate("search", search.share * seconds, lambda: why)


def _with_master(candidate: RunCandidate, budget: int) -> RunCandidate:
    """fp32 master weights where they fit beside all the rest; Axolotl trains bf16 weights in place."""
    if not candidate.full or candidate.engine is not Engine.NATIVE:
        return candidate
    master = vary(candidate, fp32_master=True)
    return master if peak_bytes(master) <= budget else candidate


def _with_eval_batch(needs: Requirements, candidate: RunCandidate, budget: int) -> RunCandidate:
    """Evaluate as many rows at once as fit beside the model, at most the micro batch."""
    if candidate.image is not None:
        return candidate
    micro = min(candidate.micro, MOST_EVAL_MICRO, needs.learned.eval_micro or MOST_EVAL_MICRO)
    while micro > 1 and not evaluation_fits(vary(candidate, eval_micro=micro), budget):
        micro //= 2
    return vary(candidate, eval_micro=max(micro, 1))
