"""GPUs, memory and time together: the candidate that a plan is written from.

For every count of GPUs in the strategy's order: make it fit in memory without loss, then see how much
training the clock leaves. Only when no count does without loss are the lossy variations tried, the mildest
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from core.domain.choices import Engine, Refusal
from core.domain.hardware import Device
from core.domain.units import show_bytes, show_seconds
from core.planning.candidate import RunCandidate, vary
from core.planning.checkpoint_choice import can_score, with_choice
from core.planning.environments import making_rows_phases
from core.planning.finishing import STRETCH_PHASE, finishing_phases, last_stretch_plan
from core.planning.gpu_count import GpuCountChoice, choose_counts, usable_gpus
from core.planning.ladder import fit_memory, with_micro
from core.planning.memory import evaluation_fits, peak_bytes
from core.planning.overheads import (
    JobConditions,
    PhaseEstimate,
    checkpoint_space,
    opening_phases,
    publish_phase,
)
from core.planning.persistent_memory import CONTEXT_BYTES
from core.planning.plan import CheckpointChoice
from core.planning.requirements import Requirements, first_candidate, largest_divisor, lr_search
from core.planning.schedule import RepeatTimes, StepSchedule, fit_schedule, repeat_times, steps_per_epoch
from core.planning.sequences import Sequences
from core.planning.speed import StepTime, least_generate_seconds
from core.profile.targets import ProfileLimits

#: Sequences in one evaluation batch, at most: the metric is computed row by row anyway.
MOST_EVAL_MICRO = 16
#: What the context leaves must hold at least this, or the limit itself is the mistake.
LEAST_BYTES = 256 * 2**20


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
    #: Images: files compared at the end.
    choice: CheckpointChoice | None = None
    #: Text: between the last step and `after`.
    finishing: tuple[PhaseEstimate, ...] = ()

    @property
    def total_s(self) -> float:
        return sum([phase.seconds for phase in self.phases])

    @property
    def share(self) -> float:
        """The part of the training asked for that is done."""
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
            why = lambda: f"every {schedule.eval_every} steps, {schedule.eval_rows} rows"  # noqa: E731
            yield PhaseEstimate("evaluate", schedule.eval_s, why)
        yield PhaseEstimate("save", schedule.save_s, lambda: f"every {schedule.save_every} steps")
        if (choice := self.choice) is not None:
            yield PhaseEstimate("choose", choice.seconds, lambda: f"the best of {choice.files} files")
        yield from self.finishing
        yield self.after


class SearchResult(NamedTuple):
    """The candidate that was chosen, or the nearest one and why it is refused."""

    best: TimedCandidate
    choice: GpuCountChoice
    code: Refusal | None = None
    reason: str = ""


def budget_of(limits: ProfileLimits, memory_bytes: int) -> int:
    """The lower of the limit in bytes and the limit as a share of the GPU's memory."""
    share = int(limits.gpu_memory_share * memory_bytes)
    return share if limits.gpu_memory is None else min(limits.gpu_memory, share)


def reserve_of(limits: ProfileLimits, deadline_s: float) -> float:
    return max(limits.reserve, limits.reserve_share * deadline_s)


def best_fit(needs: Requirements, available: int, conditions: JobConditions) -> SearchResult:
    """Find the best that these GPUs can do for these requirements."""
    choice = choose_counts(needs, available, conditions.worth)
    budget = budget_of(needs.limits, needs.kind.memory_bytes)
    if refused := _impossible(needs, choice, budget, conditions):
        return refused
    search = _Search(needs, choice, budget, conditions)
    best = search.best()
    if best is None:
        return _no_memory(needs, choice, budget, conditions)
    if not trains_enough(best, needs.limits):
        return SearchResult(best, choice, *_too_little_training(needs, best, choice))
    return SearchResult(best, choice)


class _Search:
    """Over counts of GPUs. If no count meets the requirements in full, the one that trains most wins: so
    neither more hours nor one more GPU can make the training smaller."""

    def __init__(
        self, needs: Requirements, choice: GpuCountChoice, budget: int, conditions: JobConditions
    ) -> None:
        self.needs, self.choice, self.budget, self.conditions = needs, choice, budget, conditions

    def best(self) -> TimedCandidate | None:
        if self.choice.by_value:
            return self.by_value()
        return self.by_time() if self.choice.by_time else self.by_strategy()

    def by_value(self) -> TimedCandidate | None:
        """The count whose training is worth most once its GPU-hours are paid for. Where none completes the
        training without loss, counts that do not fit without compete with what gives something up."""
        pool: list[TimedCandidate] = []
        too_small: list[int] = []
        for count in self.choice.counts:
            if not pool or self._could_be_worth_more(pool[-1], count):
                timed = self.at(count, lossy=False)
                pool += [timed] if timed else []
                too_small += [] if timed else [count]
        if not any(timed.schedule.complete for timed in pool):
            pool += self._all(too_small)
        return self._with_more_gpus(self._preferred(pool), pool)

    def _could_be_worth_more(self, fewer: TimedCandidate, count: int) -> bool:
        """Larger counts are left out once they are not worth their price even where each GPU becomes half as
        fast again, more than a change of checkpointing brings."""
        worth, here = self.conditions.worth, fewer.candidate.world
        if not worth.prices or not trains_enough(fewer, self.needs.limits):
            return True
        hours, most_share = fewer.total_s / 3600, fewer.share * 1.5 * count / here
        most = worth.net(min(most_share, 1.0), count, min(hours / most_share, hours))
        return most > worth.net(fewer.share, here, hours)

    def by_time(self) -> TimedCandidate | None:
        """The fewest GPUs that meet the requirements in full, without loss."""
        pool: list[TimedCandidate] = []
        for count in self.choice.counts:
            timed = self.at(count, lossy=False)
            if timed is not None and timed.schedule.complete:
                return timed
            pool += [timed] if timed else []
        known = {timed.candidate.world for timed in pool}
        pool += self._all(count for count in self.choice.counts if count not in known)
        return self._with_more_gpus(self._preferred(pool), pool)

    def by_strategy(self) -> TimedCandidate | None:
        """As many as the strategy gives; fewer where links make that faster, more where memory asks."""
        home = self.choice.counts[0]
        larger = [count for count in self.choice.counts if count > home]
        best = self.at(home)
        if best is not None and best.cost == 0 and best.schedule.complete:
            return best
        pool = [best] if best else []
        smaller = (count for count in self.choice.counts if count < home)
        pool += self._all(count for count in smaller if best is None or _could_beat(self.needs, best, count))
        if not self.choice.fixed and all(timed.cost for timed in pool):
            pool += self._first(larger, lossy=False)
        return self._with_more_gpus(self._preferred(pool or self._first(larger)), pool)

    def _with_more_gpus(
        self, winner: TimedCandidate | None, pool: list[TimedCandidate]
    ) -> TimedCandidate | None:
        """More GPUs fit larger passes, which pad more: they never lose to fewer for that. 70B DPO on eight
        got 0.40 epochs by passes of two pairs, seven 0.44 and eight 0.50 by passes of one."""
        if winner is None:
            return None
        more = [timed for timed in pool if timed.candidate.world > winner.candidate.world]
        smaller = [self._in_passes_of(winner, timed) for timed in more]
        fitting = (timed for timed in smaller if peak_bytes(timed.candidate) <= self.budget)
        return self._preferred([winner, *fitting])

    def _preferred(self, pool: list[TimedCandidate]) -> TimedCandidate | None:
        """What trains most or is worth most. Ties go to the mildest, then to the first; by value texts go to
        the earliest end, which leaves most time to try again. Of pictures and prompts a step of more GPUs has
        more, and is another training: they go to the fewest."""
        task = self.needs.task.task_type
        text = task.is_text and not task.generates

        def trained(timed: TimedCandidate) -> tuple[float, ...]:
            return round(timed.schedule.epochs, 3), -timed.cost

        def valued(timed: TimedCandidate) -> tuple[float, ...]:
            world, total_s = timed.candidate.world, timed.total_s
            value = round(self.conditions.worth.net(timed.share, world, total_s / 3600), 3)
            last = total_s if text else world
            return trains_enough(timed, self.needs.limits), value, -timed.cost, -last

        return max(pool, key=valued if self.choice.by_value else trained, default=None)

    def _in_passes_of(self, winner: TimedCandidate, timed: TimedCandidate) -> TimedCandidate:
        candidate = timed.candidate
        micro = largest_divisor(candidate.per_gpu, min(winner.candidate.micro, candidate.micro))
        smaller = with_micro(candidate, micro)
        return with_time(self.needs, timed.required, smaller, timed.cost, self.budget, self.conditions)

    def at(self, count: int, lossy: bool = True) -> TimedCandidate | None:
        required = first_candidate(self.needs, count)
        candidate, cost = fit_memory(self.needs, required, self.budget, lossy)
        if candidate is None:
            return None
        return with_time(self.needs, required, candidate, cost, self.budget, self.conditions)

    def _first(self, counts: list[int], lossy: bool = True) -> list[TimedCandidate]:
        timed = (self.at(count, lossy) for count in counts)
        return list(islice((each for each in timed if each), 1))

    def _all(self, counts: Iterable[int]) -> list[TimedCandidate]:
        return [timed for count in counts if (timed := self.at(count))]


def _could_beat(needs: Requirements, best: TimedCandidate, count: int) -> bool:
    """Fewer GPUs train more only if what they save in exchanging beats what they lose in computing; a third
    more speed is the most that a change of checkpointing brings. Generating takes as long on few as on many;
    where something had to be given up, fewer may give up less, so that part is left out."""
    candidate, step = best.candidate, best.step
    here, there = candidate.per_gpu, needs.per_gpu(count)
    generating = 0.0 if best.cost else least_generate_seconds(candidate)
    least = step.compute_s * (there / here) / 1.35 + generating
    return step.seconds * there * count > least * here * candidate.world


def trains_enough(timed: TimedCandidate, limits: ProfileLimits) -> bool:
    """Whether the training reaches `min_epochs`, or all that was asked for if that is less."""
    schedule = timed.schedule
    if schedule.total < 1 or timed.seq.per_epoch < 1:
        return False
    return schedule.complete or schedule.epochs >= limits.min_epochs


def with_time(
    needs: Requirements,
    required: RunCandidate,
    candidate: RunCandidate,
    cost: int,
    budget: int,
    conditions: JobConditions,
) -> TimedCandidate:
    """Fit the largest training into the time: for DPO with the reference's pass where it costs least,
    compiled where that is won back."""
    ways = [candidate]
    if candidate.task.has_pairs and needs.targets.dpo_precompute_reference is None:
        other = vary(candidate, reference_ready=not candidate.reference_ready)
        ways += [] if candidate.full and peak_bytes(other) > budget else [other]
    if candidate.compile_mode is not None and not _compiles_anyway(candidate):
        ways += [vary(way, compile_mode=None) for way in ways]
    ways = [_with_eval_batch(_with_master(needs, way, budget), budget) for way in ways]
    timed = (_timed(needs, required, way, cost, conditions) for way in ways)
    return max(timed, key=_training_then_time)


def _compiles_anyway(candidate: RunCandidate) -> bool:
    """Axolotl's fp8, which is several times slower than bf16 otherwise."""
    return candidate.engine is Engine.AXOLOTL and candidate.fp8


def _training_then_time(timed: TimedCandidate) -> tuple[float, float]:
    busy = sum(phase.seconds for phase in timed.before) + timed.schedule.train_s
    return timed.schedule.epochs, -busy


def _timed(
    needs: Requirements, required: RunCandidate, candidate: RunCandidate, cost: int, conditions: JobConditions
) -> TimedCandidate:
    seq = needs.sequences(candidate)
    deadline = needs.task.hours * 3600
    reserve = reserve_of(needs.limits, deadline)
    making = making_rows_phases(needs.task, needs.model, conditions)
    before = (*making, *opening_phases(candidate, seq, needs.model, needs.data, conditions))
    after = publish_phase(candidate, conditions)
    seconds = deadline - reserve - after.seconds - sum(phase.seconds for phase in before)
    if search := _lr_search_phase(needs, seconds):
        before, seconds = (*before, search), seconds - search.seconds
    rate, step = repeat_times(candidate, seq, needs.eval_rows, conditions.slowness)
    finishing = tuple(finishing_phases(needs, rate, steps_per_epoch(seq, candidate.effective), seconds))
    seconds -= sum(phase.seconds for phase in finishing)
    disk = checkpoint_space(candidate, needs.model, conditions)

    def fitted(seconds: float) -> StepSchedule:
        return fit_schedule(candidate, seq, rate, needs.eval_rows, seconds, needs.targets, needs.limits, disk)

    schedule, choice = fitted(seconds), None
    if (asked := needs.targets.checkpoint_choice) is not None and can_score(candidate):
        schedule, choice = with_choice(candidate, asked, before, rate, fitted, seconds)
    if (dropped := _dropped(needs, finishing, schedule.eval_rows)) is not None:
        finishing = tuple(phase for phase in finishing if phase is not dropped)
        schedule = fitted(seconds + dropped.seconds)
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
        choice=choice,
        finishing=finishing,
    )


def _dropped(
    needs: Requirements, finishing: tuple[PhaseEstimate, ...], eval_rows: int
) -> PhaseEstimate | None:
    """The last stretch, where a short training holds out too few rows for it: the steps get its seconds."""
    if last_stretch_plan(needs, eval_rows) is not None:
        return None
    return next((phase for phase in finishing if phase.name == STRETCH_PHASE), None)


def _lr_search_phase(needs: Requirements, seconds: float) -> PhaseEstimate | None:
    """The longest that the search for a learning rate may take."""
    search = lr_search(needs)
    if search is None or seconds <= 0:
        return None
    why = f"at most {search.share:.0%}: short trainings at other learning rates"
    return PhaseEstimate("search", search.share * seconds, lambda: why)


def _with_master(needs: Requirements, candidate: RunCandidate, budget: int) -> RunCandidate:
    """fp32 master weights where they fit beside all the rest; Axolotl trains bf16 weights in place."""
    if not candidate.full or needs.targets.fp32_master is False or candidate.engine is not Engine.NATIVE:
        return candidate
    master = vary(candidate, fp32_master=True)
    return master if peak_bytes(master) <= budget else candidate


def _with_eval_batch(candidate: RunCandidate, budget: int) -> RunCandidate:
    """As many rows at once as fit beside the model, at most the micro batch."""
    if candidate.image is not None:
        return candidate
    micro = min(candidate.micro, MOST_EVAL_MICRO)
    while micro > 1 and not evaluation_fits(vary(candidate, eval_micro=micro), budget):
        micro //= 2
    return vary(candidate, eval_micro=max(micro, 1))


def _impossible(
    needs: Requirements, choice: GpuCountChoice, budget: int, conditions: JobConditions
) -> SearchResult | None:
    """What no search can solve. The numbers shown are those of the requirements."""
    limits, context = needs.limits, CONTEXT_BYTES if needs.kind.device is Device.CUDA else 0
    deadline = needs.task.hours * 3600
    if budget - context < LEAST_BYTES:
        code = Refusal.IMPOSSIBLE_LIMIT
        reason = (
            f"the limit of {show_bytes(budget)} per GPU leaves nothing beside the {show_bytes(context)} "
            f"of the CUDA context; raise limits.gpu_memory or limits.gpu_memory_share"
        )
    elif deadline <= reserve_of(limits, deadline):
        code = Refusal.NO_TIME
        reason = (
            f"{needs.task.hours:g} hours are no more than the reserve of "
            f"{show_seconds(reserve_of(limits, deadline))} before the deadline"
        )
    else:
        return None
    return SearchResult(_as_required(needs, choice.counts[0], budget, conditions), choice, code, reason)


def refused_as_required(
    needs: Requirements, conditions: JobConditions, code: Refusal, reason: str
) -> SearchResult:
    """A refusal before any search, with the numbers of the requirements."""
    available = usable_gpus(needs, conditions.hardware.gpus)
    choice = choose_counts(needs, available, conditions.worth)
    budget = budget_of(needs.limits, needs.kind.memory_bytes)
    timed = _as_required(needs, min(choice.counts[0], available), budget, conditions)
    return SearchResult(timed, choice, code, reason)


def _as_required(needs: Requirements, world: int, budget: int, conditions: JobConditions) -> TimedCandidate:
    required = first_candidate(needs, world)
    return with_time(needs, required, required, 0, budget, conditions)


def _no_memory(
    needs: Requirements, choice: GpuCountChoice, budget: int, conditions: JobConditions
) -> SearchResult:
    best = _as_required(needs, max(choice.counts), budget, conditions)
    reason = (
        f"{show_bytes(peak_bytes(best.candidate))} per GPU as asked for on {max(choice.counts)} × "
        f"{needs.kind.name}, and no variation fits into the {show_bytes(budget)} of the limit"
    )
    return SearchResult(best, choice, Refusal.NO_MEMORY, reason)


def _too_little_training(
    needs: Requirements, timed: TimedCandidate, choice: GpuCountChoice
) -> tuple[Refusal, str]:
    if timed.seq.per_epoch < 1:
        longest = f"{needs.data.total.max:,} tokens" if needs.data.total.max else "empty"
        return Refusal.ROWS_TOO_LONG, (
            f"no row is left at {timed.candidate.length:,} tokens per sequence (rows are up to {longest}); "
            f"raise sequence_len or limits.max_sequence_len"
        )
    spent = sum(phase.seconds for phase in timed.before) + timed.after.seconds
    left = timed.deadline_s - timed.reserve_s - spent
    if left < timed.rate.step_s:
        return Refusal.NO_TIME, (
            f"{show_seconds(timed.deadline_s)} less {show_seconds(timed.reserve_s)} of reserve and "
            f"{show_seconds(spent)} of preparing and publishing leave {show_seconds(left)} for training"
        )
    return Refusal.TOO_SLOW, (
        f"{timed.schedule.epochs:.2g} epochs in the {show_seconds(left)} left for training, at "
        f"{timed.rate.step_s:.3g} s per step on {timed.candidate.world} GPUs ({choice.why}); "
        f"limits.min_epochs is {needs.limits.min_epochs:g}"
    )
