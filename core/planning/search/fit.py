"""GPUs, memory and time together: the candidate that a plan is written from.

For every count of GPUs in the strategy's order: make it fit in memory without loss, then see how much
training the clock leaves. Only when no count does without loss are the lossy variations tried, the mildest
first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from core.domain.choices import Refusal
from core.domain.hardware import Device
from core.domain.units import show_bytes, show_seconds
from core.planning.memory.peak import peak_bytes
from core.planning.memory.persistent import CONTEXT_BYTES
from core.planning.search.gpu_count import GpuCountChoice, choose_counts, usable_gpus
from core.planning.search.ladder import fit_memory, with_micro
from core.planning.search.requirements import Requirements, first_candidate, largest_divisor
from core.planning.search.timed_candidate import TimedCandidate, reserve_of, with_time
from core.planning.time.speed import least_generate_seconds
from core.profile.limits import ProfileLimits

#: What the context leaves must hold at least this, or the limit itself is the mistake.
LEAST_BYTES = 256 * 2**20


class SearchResult(NamedTuple):
    """The candidate that was chosen, or the nearest one and why it is refused."""

    best: TimedCandidate
    choice: GpuCountChoice
    code: Refusal | None = None
    reason: str = ""


def budget_of(needs: Requirements) -> int:
    """The lowest of the limit in bytes, the limit as a share of the GPU's memory, and what ran out."""
    share = int(needs.limits.gpu_memory_share * needs.kind.memory_bytes)
    return min(share, needs.limits.gpu_memory or share, needs.learned.memory_bytes or share)


def best_fit(needs: Requirements, available: int) -> SearchResult:
    """Find the best that these GPUs can do for these requirements."""
    choice = choose_counts(needs, available)
    budget = budget_of(needs)
    if refused := _impossible(needs, choice, budget):
        return refused
    search = _Search(needs, choice, budget)
    best = search.best()
    if best is None:
        return _no_memory(needs, choice, budget)
    if not trains_enough(best, needs.limits):
        return SearchResult(best, choice, *_too_little_training(needs, best, choice))
    return SearchResult(best, choice)


class _Search:
    """Over counts of GPUs. If no count meets the requirements in full, the one that trains most wins: so
    neither more hours nor one more GPU can make the training smaller."""

    def __init__(self, needs: Requirements, choice: GpuCountChoice, budget: int) -> None:
        self.needs, self.choice, self.budget = needs, choice, budget

    def best(self) -> TimedCandidate | None:
        if self.choice.by_value:
            return self.by_value()
        return self.by_time() if self.choice.by_time else self.by_strategy()

    def by_value(self) -> TimedCandidate | None:
        """Return the plan whose training is worth most after the price of its GPU-hours. If no number of GPUs
        completes the training without loss, those too small for that compete with what gives targets up."""
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
        """Larger counts are skipped once they would not be worth their price even if each GPU were half as
        fast again, which is more than a change of checkpointing brings. GPUs that cost nothing are never
        skipped: the training ends earlier on them."""
        worth, here = self.needs.conditions.worth, fewer.candidate.world
        if not any(worth.prices[:count]) or not trains_enough(fewer, self.needs.limits):
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
        """Take as many as the strategy gives; fewer where links make that faster, more where memory asks."""
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
        """Return the plan that trains most or is worth most. Ties go to the mildest, then to the first.
        `by_value` breaks ties of text tasks by the earliest end, which leaves most time for another attempt;
        those of images and GRPO by the fewest GPUs, since more of them take larger steps."""
        task = self.needs.task.task_type
        text = task.is_text and not task.generates

        def trained(timed: TimedCandidate) -> tuple[float, ...]:
            return round(timed.schedule.epochs, 3), -timed.cost

        def valued(timed: TimedCandidate) -> tuple[float, ...]:
            world, total_s = timed.candidate.world, timed.total_s
            value = round(self.needs.conditions.worth.net(timed.share, world, total_s / 3600), 3)
            last = total_s if text else world
            return trains_enough(timed, self.needs.limits), value, -timed.cost, -last

        return max(pool, key=valued if self.choice.by_value else trained, default=None)

    def _in_passes_of(self, winner: TimedCandidate, timed: TimedCandidate) -> TimedCandidate:
        candidate = timed.candidate
        micro = largest_divisor(candidate.per_gpu, min(winner.candidate.micro, candidate.micro))
        smaller = with_micro(candidate, micro)
        return with_time(self.needs, timed.required, smaller, timed.cost, self.budget)

    def at(self, count: int, lossy: bool = True) -> TimedCandidate | None:
        required = first_candidate(self.needs, count)
        candidate, cost = fit_memory(self.needs, required, self.budget, lossy)
        if candidate is None:
            return None
        return with_time(self.needs, required, candidate, cost, self.budget)

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
    """Return whether the training reaches `min_epochs`, or all that was asked for if that is less."""
    schedule = timed.schedule
    if schedule.total < 1 or timed.seq.per_epoch < 1:
        return False
    return schedule.complete or schedule.epochs >= limits.min_epochs


def _impossible(needs: Requirements, choice: GpuCountChoice, budget: int) -> SearchResult | None:
    """Refuse what no search can solve. The numbers shown are those of the requirements."""
    limits, context = needs.limits, CONTEXT_BYTES if needs.kind.device is Device.CUDA else 0
    deadline = needs.task.hours * 3600
    if budget - context < LEAST_BYTES and needs.learned.memory_bytes is None:
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
    return SearchResult(_as_required(needs, choice.counts[0], budget), choice, code, reason)


def refused_as_required(needs: Requirements, code: Refusal, reason: str) -> SearchResult:
    """A refusal before any search, with the numbers of the requirements."""
    available = usable_gpus(needs)
    choice = choose_counts(needs, available)
    budget = budget_of(needs)
    timed = _as_required(needs, min(choice.counts[0], available), budget)
    return SearchResult(timed, choice, code, reason)


def _as_required(needs: Requirements, world: int, budget: int) -> TimedCandidate:
    required = first_candidate(needs, world)
    return with_time(needs, required, required, 0, budget)


def _no_memory(needs: Requirements, choice: GpuCountChoice, budget: int) -> SearchResult:
    best = _as_required(needs, max(choice.counts), budget)
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
