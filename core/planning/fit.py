"""GPUs, memory and time together: the candidate that a plan is written from.

For every count of GPUs in the strategy's order: make it fit in memory without loss, then see how much
training the clock leaves. Only when no count does without loss are the lossy variations tried, the mildest
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from core.budget import Refusal
from core.choices import Engine
from core.hardware import Device
from core.planning.costs import Site, Stretch, checkpoint_room, opening, publishing
from core.planning.gpus import Choice, choose_counts
from core.planning.ladder import Fitted, fit_memory
from core.planning.memory import evaluation_fits, peak_bytes
from core.planning.schedule import Rates, Schedule, fit_schedule, rates
from core.planning.sequences import Sequences
from core.planning.setup import Setup, vary
from core.planning.speed import StepTime, least_generate_seconds
from core.planning.start import start
from core.planning.states import CONTEXT_BYTES
from core.planning.wishes import Wish, lr_search
from core.profile.targets import Limits
from core.tasks import TaskType
from core.units import show_bytes, show_seconds

#: Sequences that an evaluation works on at once, at most: the metric is computed row by row anyway.
MOST_EVAL_MICRO = 16
#: What the context leaves must hold at least this, or the limit itself is the mistake.
LEAST_BYTES = 256 * 2**20


class Timed(NamedTuple):
    """A setup with its schedule."""

    wished: Setup
    setup: Setup
    #: How far down the list of lossy variations it lies.
    cost: int
    seq: Sequences
    rate: Rates
    step: StepTime
    before: tuple[Stretch, ...]
    after: Stretch
    schedule: Schedule
    deadline_s: float
    reserve_s: float

    @property
    def stretches(self) -> Iterator[Stretch]:
        """From now to the end. Evaluations and checkpoints are sums, not moments."""
        one, rate = self.schedule, self.rate
        yield from self.before
        yield Stretch(
            "train",
            one.train_s,
            lambda: f"{one.total:,} steps of {rate.step_s:.3g} s, {one.epochs:.3g} epochs",
        )
        if one.eval_s:
            why = lambda: f"every {one.eval_every} steps, {one.eval_rows} rows"  # noqa: E731
            yield Stretch("evaluate", one.eval_s, why)
        yield Stretch("save", one.save_s, lambda: f"every {one.save_every} steps")
        yield self.after


class Fit(NamedTuple):
    """The candidate that was chosen, or the nearest one and why it will not do."""

    best: Timed
    choice: Choice
    code: Refusal | None = None
    reason: str = ""


def budget_of(limits: Limits, memory_bytes: int) -> int:
    """The lower of the limit in bytes and the limit as a share of the card."""
    share = int(limits.gpu_memory_share * memory_bytes)
    return share if limits.gpu_memory is None else min(limits.gpu_memory, share)


def reserve_of(limits: Limits, deadline_s: float) -> float:
    return max(limits.reserve, limits.reserve_share * deadline_s)


def fit(wish: Wish, available: int, site: Site) -> Fit:
    """The best that these GPUs can do for this wish."""
    choice = choose_counts(wish, available)
    budget = budget_of(wish.limits, wish.kind.memory_bytes)
    if refused := _impossible(wish, choice, budget, site):
        return refused
    search = _Search(wish, choice, budget, site)
    found = search.by_time() if choice.by_time else search.by_strategy()
    if found is None:
        return _no_memory(wish, choice, budget, site)
    if not trains_enough(found, wish.limits):
        return Fit(found, choice, *_why_not(wish, found, choice))
    return Fit(found, choice)


class _Search:
    """Over counts of GPUs. Where the wish cannot be had whole, the count that trains most wins: so neither
    more hours nor one more GPU can make the training smaller."""

    def __init__(self, wish: Wish, choice: Choice, budget: int, site: Site) -> None:
        self.wish, self.choice, self.budget, self.site = wish, choice, budget, site

    def by_time(self) -> Timed | None:
        """The fewest GPUs that hold the whole wish without loss."""
        pool: list[Timed] = []
        for count in self.choice.counts:
            found = self.at(count, lossy=False)
            if found is not None and found.schedule.complete:
                return found
            pool += [found] if found else []
        known = {one.setup.world for one in pool}
        pool += self._all(count for count in self.choice.counts if count not in known)
        return _most_trained(pool)

    def by_strategy(self) -> Timed | None:
        """As many as the strategy gives; fewer where links make that faster, more where memory asks."""
        home = self.choice.counts[0]
        larger = [count for count in self.choice.counts if count > home]
        best = self.at(home)
        if best is not None and best.cost == 0 and best.schedule.complete:
            return best
        pool = [best] if best else []
        smaller = (count for count in self.choice.counts if count < home)
        pool += self._all(count for count in smaller if best is None or _could_beat(self.wish, best, count))
        if not self.choice.stays and all(one.cost for one in pool):
            pool += self._first(larger, lossy=False)
        return _most_trained(pool or self._first(larger))

    def at(self, count: int, lossy: bool = True) -> Timed | None:
        fitted = fit_memory(self.wish, count, self.budget, lossy)
        return with_time(self.wish, fitted, self.budget, self.site) if fitted else None

    def _first(self, counts: list[int], lossy: bool = True) -> list[Timed]:
        found = (self.at(count, lossy) for count in counts)
        return list(islice((one for one in found if one), 1))

    def _all(self, counts: Iterable[int]) -> list[Timed]:
        return [found for count in counts if (found := self.at(count))]


def _most_trained(pool: list[Timed]) -> Timed | None:
    """Ties go to the mildest, then to the first."""
    return max(pool, key=lambda timed: (round(_trained(timed), 3), -timed.cost), default=None)


def _could_beat(wish: Wish, best: Timed, count: int) -> bool:
    """Fewer GPUs train more only if what they save in exchanging beats what they lose in computing; a third
    more speed is the most that a change of checkpointing brings. Generating takes as long on few as on many;
    where something had to be given up, fewer may give up less, and are looked at all the same."""
    setup, step = best.setup, best.step
    here, there = setup.micro * setup.accumulation, wish.per_gpu(count)
    generating = 0.0 if best.cost else least_generate_seconds(setup)
    least = step.compute_s * (there / here) / 1.35 + generating
    return step.seconds * there * count > least * here * setup.world


def _trained(timed: Timed) -> float:
    return timed.schedule.epochs


def trains_enough(timed: Timed, limits: Limits) -> bool:
    """A training that was wished to be short is not too short."""
    schedule = timed.schedule
    if schedule.total < 1 or timed.seq.per_epoch < 1:
        return False
    return schedule.complete or schedule.epochs >= limits.min_epochs


def with_time(wish: Wish, fitted: Fitted, budget: int, site: Site) -> Timed:
    """The largest training; for DPO with the reference's pass where it costs least time."""
    setup = _evaluating(_with_master(wish, fitted.setup, budget), budget)
    found = _timed(wish, fitted, setup, site)
    if setup.task is not TaskType.DPO or wish.targets.dpo_precompute_reference is not None:
        return found
    other = vary(setup, reference_ready=not setup.reference_ready)
    if setup.full and peak_bytes(other) > budget:
        return found
    return max(found, _timed(wish, fitted, other, site), key=lambda timed: (_trained(timed), -_busy(timed)))


def _busy(timed: Timed) -> float:
    return sum(phase.seconds for phase in timed.before) + timed.schedule.train_s


def _timed(wish: Wish, fitted: Fitted, setup: Setup, site: Site) -> Timed:
    seq = wish.sequences(setup)
    deadline = wish.task.hours * 3600
    reserve = reserve_of(wish.limits, deadline)
    before = tuple(opening(setup, seq, wish.model, wish.data, site))
    after = publishing(setup, site)
    seconds = deadline - reserve - after.seconds - sum(phase.seconds for phase in before)
    if searched := _searching(wish, seconds):
        before, seconds = (*before, searched), seconds - searched.seconds
    rate, step = rates(setup, seq, wish.eval_rows, site.slowness)
    disk = checkpoint_room(setup, wish.model, site)
    schedule = fit_schedule(setup, seq, rate, wish.eval_rows, seconds, wish.targets, wish.limits, disk)
    return Timed(
        wished=fitted.wished,
        setup=setup,
        cost=fitted.cost,
        seq=seq,
        rate=rate,
        step=step,
        before=before,
        after=after,
        schedule=schedule,
        deadline_s=deadline,
        reserve_s=reserve,
    )


def _searching(wish: Wish, seconds: float) -> Stretch | None:
    """The search for a learning rate, as long as it may take at most."""
    searched = lr_search(wish)
    if searched is None or seconds <= 0:
        return None
    share = searched.share
    why = f"at most {share:.0%}: short trainings at other learning rates"
    return Stretch("search", share * seconds, lambda: why)


def _with_master(wish: Wish, setup: Setup, budget: int) -> Setup:
    """fp32 master weights where they fit beside all the rest; Axolotl trains bf16 weights in place."""
    if not setup.full or wish.targets.fp32_master is False or setup.engine is not Engine.NATIVE:
        return setup
    master = vary(setup, fp32_master=True)
    return master if peak_bytes(master) <= budget else setup


def _evaluating(setup: Setup, budget: int) -> Setup:
    """As many rows at once as fit beside the model, at most the micro batch."""
    if setup.picture is not None:
        return setup
    micro = min(setup.micro, MOST_EVAL_MICRO)
    while micro > 1 and not evaluation_fits(vary(setup, eval_micro=micro), budget):
        micro //= 2
    return vary(setup, eval_micro=max(micro, 1))


def _impossible(wish: Wish, choice: Choice, budget: int, site: Site) -> Fit | None:
    """What no search can mend. The numbers shown are those of the wish itself."""
    limits, context = wish.limits, CONTEXT_BYTES if wish.kind.device is Device.CUDA else 0
    deadline = wish.task.hours * 3600
    code, reason = None, ""
    if budget - context < LEAST_BYTES:
        code = Refusal.IMPOSSIBLE_LIMIT
        reason = (
            f"the limit of {show_bytes(budget)} per GPU leaves nothing beside the {show_bytes(context)} "
            f"of the CUDA context; raise limits.gpu_memory or limits.gpu_memory_share"
        )
    elif deadline <= reserve_of(limits, deadline):
        code = Refusal.NO_TIME
        reason = (
            f"{wish.task.hours:g} hours are no more than the reserve of "
            f"{show_seconds(reserve_of(limits, deadline))} before the deadline"
        )
    if code is None:
        return None
    return Fit(_wished(wish, choice.counts[0], budget, site), choice, code, reason)


def as_wished(wish: Wish, site: Site, code: Refusal, reason: str) -> Fit:
    """A refusal before any search: the wish's own numbers, to look at."""
    available = site.hardware.gpus.count
    choice = choose_counts(wish, available)
    budget = budget_of(wish.limits, wish.kind.memory_bytes)
    return Fit(_wished(wish, min(choice.counts[0], available), budget, site), choice, code, reason)


def _wished(wish: Wish, world: int, budget: int, site: Site) -> Timed:
    wished = start(wish, world)
    return with_time(wish, Fitted(wished, wished, 0), budget, site)


def _no_memory(wish: Wish, choice: Choice, budget: int, site: Site) -> Fit:
    best = _wished(wish, max(choice.counts), budget, site)
    needs = show_bytes(peak_bytes(best.setup))
    reason = (
        f"{needs} per GPU as wished on {max(choice.counts)} × {wish.kind.name}, and no variation fits into "
        f"the {show_bytes(budget)} of the limit"
    )
    return Fit(best, choice, Refusal.NO_MEMORY, reason)


def _why_not(wish: Wish, timed: Timed, choice: Choice) -> tuple[Refusal, str]:
    seq, schedule = timed.seq, timed.schedule
    if seq.per_epoch < 1:
        longest = f"{wish.data.total.max:,} tokens" if wish.data.total.max else "empty"
        return Refusal.ROWS_TOO_LONG, (
            f"no row is left at {timed.setup.length:,} tokens per sequence (rows are up to {longest}); "
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
        f"{schedule.epochs:.2g} epochs in the {show_seconds(left)} left for training, at "
        f"{timed.rate.step_s:.3g} s per step on {timed.setup.world} GPUs ({choice.why}); "
        f"limits.min_epochs is {wish.limits.min_epochs:g}"
    )
