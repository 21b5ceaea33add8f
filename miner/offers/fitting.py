"""Whether a task can be done here: planned for the GPUs that there are, and given a place among the others.

The plan says how many GPUs and how long; the place says when they are free. Where it has to wait, the plan is
made again for the hours that are left then. Where too few are free, it is made for fewer. Where none is free
for as long as an offer may wait, nothing is planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from core.budget import Refusal
from core.choices import GpuStrategy
from core.errors import ConfigError
from core.hardware import Hardware
from core.planning.gpus import lane_for
from core.planning.planner import PlanSummary, quick_plan
from core.profile.load import LoadedProfile
from core.profile.resolve import resolve
from core.profile.schema import ResolvedProfile
from core.units import show_seconds
from miner.fleet.base import FleetSnapshot, NamedLane, Placement
from miner.fleet.placing import Placing
from miner.offers.ask import Ask
from miner.offers.decision import PlanBrief, Reason
from miner.offers.policies.schema import Fitting

#: What would have to change for a plan that was refused.
_WAYS: dict[Refusal, str] = {
    Refusal.NO_TIME: "more hours in the offer, or a smaller limits.reserve in the profile",
    Refusal.TOO_SLOW: "more hours in the offer, more GPUs, or a smaller limits.min_epochs in the profile",
    Refusal.NO_MEMORY: "more or larger GPUs, or lower targets in the profile",
    Refusal.IMPOSSIBLE_LIMIT: "other limits in the profile",
    Refusal.UNKNOWN_SIZE: "a parameter count in the offer, or a size in the model's name",
    Refusal.ABSURD_SIZE: "a parameter count that a model can have",
    Refusal.EMPTY_DATASET: "a dataset with rows",
    Refusal.ROWS_TOO_LONG: "a larger sequence_len or limits.max_sequence_len in the profile",
    Refusal.NO_GPU: "more usable GPUs, or a smaller limits.min_gpus in the profile",
    Refusal.NO_ENGINE: "an engine that trains this kind of task",
}


#: Rows at most that validators pair with a number of hours: (hours up to, rows).
_MOST_ROWS = ((1, 10_000), (2, 25_000), (3, 100_000), (math.inf, 500_000))


class Fit(NamedTuple):
    """The verdicts on plan and place, and what they rest on as far as they came."""

    reasons: tuple[Reason, ...]
    code: Refusal | None = None
    plan: PlanSummary | None = None
    placement: Placement | None = None
    wait_s: float = 0.0
    #: Whose cards it gets rather than others.
    lane: NamedLane | None = None

    @property
    def brief(self) -> PlanBrief | None:
        plan = self.plan
        if plan is None:
            return None
        return PlanBrief(plan.gpus, plan.total_s, self.wait_s, plan.epochs, plan.share)


def fit_in(ask: Ask, now: float, fleet: FleetSnapshot, terms: Fitting, profile: LoadedProfile) -> Fit:
    """The best place there is, or why there is none."""
    inventory = _inventory(fleet)
    if fleet.hardware is None or not fleet.usable:
        return Fit((inventory, *_without_gpus()), Refusal.NO_GPU)
    try:
        resolved = resolve(profile, ask.task_type, ask.model)
    except ConfigError as error:
        text = f"profile {profile.name} contradicts itself for such tasks: {error.problems[0]}"
        return Fit((inventory, *_unplanned(text, "a profile that `profile check` finds fine")))
    try_out = _Tries(ask, now, fleet, terms, resolved, fleet.hardware)
    if (no_gpu := try_out.no_gpu_in_time()) is not None:
        return Fit((inventory, no_gpu))
    whole = try_out.plan(fleet.hardware.gpus.count)
    if whole.code is not None:
        return Fit((inventory, *_unplanned(whole.reason, _WAYS[whole.code])), whole.code, whole)
    planned = _planned(whole)
    if (too_much := try_out.too_much_data(whole)) is not None:
        return Fit((inventory, *_unplanned(too_much, _WAYS[Refusal.TOO_SLOW])), Refusal.TOO_SLOW, whole)
    best = try_out.best(whole)
    if best is None:
        free = try_out.none_free(
            f"{whole.gpus} GPUs",
            f" for {show_seconds(whole.total_s)}",
            try_out.wait_s,
            ", nor would fewer do",
        )
        return Fit((inventory, planned, free), None, whole)
    plan, placement = best
    wait = max(placement.starts_at - now, 0.0)
    when = "at once" if wait <= 0 else f"after {show_seconds(wait)} of waiting"
    free = Reason("gpus", True, f"{', '.join(placement.gpus)} {when} ({placement.why})")
    return Fit((inventory, _planned(plan), free), None, plan, placement, wait, try_out.lane)


class _Tries:
    def __init__(
        self,
        ask: Ask,
        now: float,
        fleet: FleetSnapshot,
        terms: Fitting,
        profile: ResolvedProfile,
        hardware: Hardware,
    ) -> None:
        self.ask, self.now, self.fleet, self.terms = ask, now, fleet, terms
        self.profile, self.hardware = profile, hardware
        #: Where the whole wish could be had, whatever the wait; known once it can't be had at once.
        self.earliest: Placement | None = None
        self._placing = Placing(fleet, now)
        self._found: dict[tuple[int, float], list[Placement]] = {}
        self.lane: NamedLane | None = None
        if profile.targets.gpu_strategy is GpuStrategy.LANES:
            self.lane = lane_for(profile.targets, ask.model, ask.task_type)

    def no_gpu_in_time(self) -> Reason | None:
        """Why no plan could be given a place: not a single GPU is free early enough."""
        shortest = max(self.terms.start_delay, 1.0)
        soonest = min((one.starts_at for one in self._windows(1, shortest)), default=None)
        wait = None if soonest is None else soonest - self.now
        if wait is not None and wait <= self.terms.max_wait:
            return None
        return self.none_free("not planned: no GPU", " is free", wait)

    def plan(self, gpus: int, wait_s: float = 0.0) -> PlanSummary:
        ask = self.ask
        # Whole minutes: moments differ, plans need not.
        hours = ask.hours if wait_s <= 0 else ask.hours - math.ceil(wait_s / 60) / 60
        hardware = self.hardware
        if gpus != hardware.gpus.count:
            hardware = hardware.model_copy(update={"gpus": hardware.gpus.take(gpus)})
        return quick_plan(
            ask.model,
            hours,
            ask.task_type,
            hardware,
            self.profile,
            image_type=ask.image_type,
            rows=ask.rows,
            stated_params=ask.planned_params,
        )

    def too_much_data(self, plan: PlanSummary) -> str | None:
        """An offer does not tell how many rows there are. Training on them can be cut short, but not DPO's
        pass of the reference model over all of them: it must leave time with the largest dataset too."""
        if not plan.reference_s or not plan.rows:
            return None
        most = next(rows for hours, rows in _MOST_ROWS if self.ask.hours <= hours)
        longer = plan.reference_s * max(most / plan.rows - 1, 0.0)
        late = plan.around_s + longer - plan.budget_s
        if late < 0:
            return None
        return (
            f"with {most:,} rows, as many as validators give {self.ask.hours:g} h, the pass of the reference "
            f"model over them would end {show_seconds(late)} too late to train"
        )

    def best(self, whole: PlanSummary) -> tuple[PlanSummary, Placement] | None:
        """At once on as many GPUs as wished; else whatever trains most."""
        at_once = self._placed(whole, self.now)
        if at_once is not None:
            return whole, at_once
        windows = self._windows(whole.gpus, self._seconds(whole, 0.0))
        self.earliest = min(windows, key=lambda one: one.starts_at, default=None)
        found = [one for one in (self._later(whole), *self._fewer(whole)) if one is not None]
        return max(found, key=lambda one: (one[0].share, -one[1].starts_at), default=None)

    def _later(self, whole: PlanSummary) -> tuple[PlanSummary, Placement] | None:
        """The same GPUs when they are free, with the hours that are left by then."""
        waiting, wait = self.earliest, self.wait_s
        if waiting is None or wait is None or wait > self.terms.max_wait:
            return None
        rest = self.plan(whole.gpus, wait)
        if not self._will_do(rest) or rest.gpus != whole.gpus:
            return None
        seconds = self._seconds(rest, wait)
        return rest, Placement(waiting.gpus, waiting.starts_at, waiting.starts_at + seconds, waiting.why)

    @property
    def wait_s(self) -> float | None:
        """Until as many GPUs as wished are free, where that is before the task's deadline."""
        return None if self.earliest is None else max(self.earliest.starts_at - self.now, 0.0)

    def _fewer(self, whole: PlanSummary) -> Iterator[tuple[PlanSummary, Placement] | None]:
        """Half of the GPUs, a quarter …: the first that has room and can do it."""
        count = whole.gpus // 2
        while self.terms.fewer_gpus and self.lane is None and count >= 1:
            if self._room(count, self._seconds(whole, 0.0), self.now) is not None:
                smaller = self.plan(count)
                placed = self._placed(smaller, self.now) if self._will_do(smaller) else None
                if placed is not None:
                    yield smaller, placed
                    return
            count //= 2

    def _will_do(self, plan: PlanSummary) -> bool:
        return plan.feasible and self.too_much_data(plan) is None

    def _placed(self, plan: PlanSummary, latest_start: float) -> Placement | None:
        return self._room(plan.gpus, self._seconds(plan, 0.0), latest_start)

    def _room(self, count: int, seconds: float, latest_start: float) -> Placement | None:
        for one in self._windows(count, seconds):
            if one.starts_at <= latest_start:
                return one
        return None

    def _windows(self, count: int, seconds: float) -> list[Placement]:
        """The earliest up to the deadline in each pool of cards, what the task should rather have first. They
        are looked for once and answer for every limit."""
        asked = (count, seconds)
        if asked not in self._found:
            deadline = self.now + max(self.ask.hours, 0.0) * 3600
            options = self._placing.options(count, duration_s=seconds, latest_start=deadline, lane=self.lane)
            self._found[asked] = list(options)
        return self._found[asked]

    def none_free(self, what: str, verb: str, wait_s: float | None, also: str = "") -> Reason:
        held = (
            f"{len({gpu for hold in self.fleet.holds for gpu in hold.gpus})} of {len(self.fleet.usable)} held"
        )
        where = ""
        if self.lane is not None:
            name, lane = self.lane
            where = f" of lane {name}{' or beyond it' if lane.overflow else ''}"
        if wait_s is None:
            text = f"{what}{where}{verb} before its deadline{also}; {held}"
            return Reason("gpus", False, text, "GPUs that are free earlier")
        text = f"{what}{where}{verb} within {show_seconds(self.terms.max_wait)}{also}; {held}"
        way = f"fitting.max_wait of {math.ceil(wait_s / 60)}m, if the time after it is enough, or free GPUs"
        return Reason("gpus", False, f"{text}; free in {show_seconds(wait_s)}", way)

    def _seconds(self, plan: PlanSummary, wait_s: float) -> float:
        """How long to hold the GPUs: the plan and something to spare, but not beyond the deadline, and all of
        it a little longer since the start, and with it the deadline, comes later than the offer."""
        until_deadline = self.ask.hours * 3600 - wait_s
        return min(plan.total_s * (1 + self.terms.spare), until_deadline) + self.terms.start_delay


def _inventory(fleet: FleetSnapshot) -> Reason:
    """Cards that can't be seen may be gone: a refusal costs nothing, a missed task does."""
    if fleet.trouble is None:
        out = [f"{gpu.id} ({gpu.out})" for gpu in fleet.gpus if gpu.out is not None]
        text = f"{len(fleet.usable)} GPUs are usable" + (f"; not {', '.join(out)}" if out else "")
        return Reason("inventory", True, text)
    text = f"the GPUs could not be looked at this time: {fleet.trouble}"
    return Reason("inventory", False, text, "an inventory that can be read; see god-miner doctor")


def _without_gpus() -> tuple[Reason, Reason]:
    return _unplanned("no GPU is usable", "a usable GPU")


def _unplanned(text: str, way: str) -> tuple[Reason, Reason]:
    return (
        Reason("plan", False, text, way),
        Reason("gpus", False, "not looked for: there is no plan", "a feasible plan"),
    )


def _planned(plan: PlanSummary) -> Reason:
    text = (
        f"{plan.gpus}x{plan.gpu_kind} for {show_seconds(plan.total_s)}, {plan.epochs:.2g} epochs "
        f"({plan.share:.0%} of the wish), ends {show_seconds(plan.slack_s)} before the reserve"
    )
    return Reason("plan", True, text)
