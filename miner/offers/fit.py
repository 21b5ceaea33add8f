"""Fit a task onto the fleet: plan it for the GPUs there are, and find a place for it among the others.

Each class of nodes is planned by its own hardware, and the one that trains most is taken. The plan says how
many GPUs and for how long, the place says when they are free. If it has to wait, it is planned again for the
hours that are left then; if too few GPUs are free, for fewer. If none is free for as long as an offer may
wait, nothing is planned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from core.domain.choices import Engine, GpuStrategy, Refusal
from core.domain.decisions import PlanBrief, TrainingWorth
from core.domain.errors import ConfigError
from core.domain.keys import NamedLane, Placement, node_of
from core.domain.units import show_seconds
from core.planning.planner import PlanSummary, quick_plan
from core.planning.search.gpu_count import lane_for
from core.profile.resolve import LoadedProfile, engine_for, resolve_profile
from core.profile.schema import ResolvedProfile
from miner.fleet.base import BackendAbility, FleetSnapshot, NodeClass
from miner.fleet.placement import PlacementSearch
from miner.offers.parsed_offer import ParsedOffer
from miner.offers.policies.schema import FitTerms


class RuleVerdict(NamedTuple):
    """Outcome of a rule: a reason of the decision but for the rule's name."""

    passed: bool
    text: str
    #: For one that failed: what would have to change.
    way: str = ""
    #: The message to a validator, where the rule's own message is too vague.
    public: str = ""


class _RefusedPlan(NamedTuple):
    #: The change that would help.
    way: str
    #: The message to a validator; empty: as the rule `plan` says.
    public: str = ""


_REFUSED_PLANS: dict[Refusal, _RefusedPlan] = {
    Refusal.NO_TIME: _RefusedPlan("more hours in the offer, or a smaller limits.reserve in the profile"),
    Refusal.TOO_SLOW: _RefusedPlan(
        "more hours in the offer, more GPUs, or a smaller limits.min_epochs in the profile"
    ),
    Refusal.NO_MEMORY: _RefusedPlan(
        "more or larger GPUs, or lower targets in the profile", "the model is too large for this miner"
    ),
    Refusal.IMPOSSIBLE_LIMIT: _RefusedPlan("other limits in the profile"),
    Refusal.UNKNOWN_SIZE: _RefusedPlan(
        "a parameter count in the offer, or a size in the model's name", "the size of the model is not known"
    ),
    Refusal.ABSURD_SIZE: _RefusedPlan(
        "a parameter count that a model can have", "the model is too large for this miner"
    ),
    Refusal.EMPTY_DATASET: _RefusedPlan("a dataset with rows", "the dataset is empty"),
    Refusal.ROWS_TOO_LONG: _RefusedPlan("a larger sequence_len or limits.max_sequence_len in the profile"),
    Refusal.NO_GPU: _RefusedPlan(
        "more usable GPUs, or a smaller limits.min_gpus in the profile", "no capacity at the moment"
    ),
    Refusal.NO_ENGINE: _RefusedPlan(
        "a model of a kind that is trained here", "such models are not trained here"
    ),
}

#: Most rows that validators pair with a number of hours: (hours up to, rows).
_MAX_ROWS = ((1, 10_000), (2, 25_000), (3, 100_000), (math.inf, 500_000))

PlacedPlan = tuple[PlanSummary, Placement]


class FitResult(NamedTuple):
    """The verdicts on plan and GPUs, and what they rest on as far as the search came."""

    gpus_verdict: RuleVerdict
    #: None if nothing was planned, since no GPU is free in time.
    plan_verdict: RuleVerdict | None = None
    refusal: Refusal | None = None
    plan: PlanSummary | None = None
    placement: Placement | None = None
    wait_s: float = 0.0
    #: The lane whose GPUs it prefers.
    lane: NamedLane | None = None

    @property
    def brief(self) -> PlanBrief | None:
        plan = self.plan
        if plan is None:
            return None
        return PlanBrief(plan.gpus, plan.total_s, self.wait_s, plan.epochs, plan.share)


def fit_offer(
    offer: ParsedOffer,
    now: float,
    fleet: FleetSnapshot,
    terms: FitTerms,
    profile: LoadedProfile,
    worth: TrainingWorth,
) -> FitResult:
    """The best place there is, or why there is none."""
    if not fleet.inventory.classes or not fleet.usable:
        return _unplanned("no GPU is usable", "a usable GPU", Refusal.NO_GPU)
    classes = _usable_classes(offer, fleet, profile)
    if not classes:
        text = "no GPU is usable where a backend can train such tasks"
        return _unplanned(text, "a usable GPU, or what the backend lacks", Refusal.NO_GPU)
    try:
        resolved = resolve_profile(profile, offer.task_type, offer.model, offer.rows)
    except ConfigError as error:
        text = f"profile {profile.name} contradicts itself for such tasks: {error.problems[0]}"
        return _unplanned(text, "a profile that `profile check` finds fine")
    places = PlacementSearch(fleet, now)
    searches = [_FitSearch(offer, now, fleet, terms, resolved, nodes, places, worth) for nodes in classes]
    results = [(_fit_class(search), search.nodes) for search in searches]
    return max(results, key=_rank)[0]


def _rank(result: tuple[FitResult, NodeClass]) -> tuple[float, ...]:
    """Rank by most training, then the earliest start, then the least hardware, in the smaller nodes. If none
    fits, rank by how near it comes."""
    fit, nodes = result
    if fit.placement is None or fit.plan is None:
        has_plan = fit.plan_verdict is not None and fit.plan_verdict.passed
        return (-1.0, float(has_plan), fit.plan.share if fit.plan else 0.0)
    used = fit.plan.gpus * nodes.hardware.gpus.kind.bf16_flops
    return (fit.plan.share, -fit.placement.starts_at, -used, -nodes.hardware.gpus.count)


def _fit_class(search: _FitSearch) -> FitResult:
    """The best place on nodes of one class, or why there is none."""
    if (no_gpu := search.no_gpu_in_time()) is not None:
        return FitResult(no_gpu)
    full = search.plan(search.hardware.gpus.count)
    if full.code is not None:
        return _unplanned(full.reason, _REFUSED_PLANS[full.code].way, full.code, full)
    if (too_much := search.too_much_data(full)) is not None:
        return _unplanned(too_much, _REFUSED_PLANS[Refusal.TOO_SLOW].way, Refusal.TOO_SLOW, full)
    best = search.best(full)
    if best is None:
        verb = f" for {show_seconds(full.total_s)}"
        free = search.none_free(f"{full.gpus} GPUs", verb, search.wait_s, ", nor would fewer do")
        return FitResult(free, _planned(full), plan=full)
    plan, placement = best
    wait = max(placement.starts_at - search.now, 0.0)
    when = "at once" if wait <= 0 else f"after {show_seconds(wait)} of waiting"
    free = RuleVerdict(True, f"{', '.join(placement.gpus)} {when} ({placement.why})")
    return FitResult(free, _planned(plan), None, plan, placement, wait, search.lane)


def training_engine(offer: ParsedOffer, profile: LoadedProfile) -> Engine | None:
    try:
        targets = resolve_profile(profile, offer.task_type, offer.model, offer.rows).targets
    except ConfigError:  # the rule `plan` reports it
        return None
    return engine_for(targets, offer.task_type, offer.image_type)


def able_to_train(
    offer: ParsedOffer, fleet: FleetSnapshot, profile: LoadedProfile
) -> dict[str, BackendAbility]:
    """The backends that can train such tasks, as far as is known, whether or not they have a sandbox."""
    working = {name: able for name, able in fleet.abilities.items() if able.problem is None}
    needs = training_engine(offer, profile) if any(able.missing for able in working.values()) else None
    return {name: able for name, able in working.items() if needs not in able.missing}


def _usable_classes(offer: ParsedOffer, fleet: FleetSnapshot, profile: LoadedProfile) -> Sequence[NodeClass]:
    """The nodes whose backend can train the task; all, where no backend can, and the rules say why."""
    classes = fleet.inventory.classes
    if len(fleet.abilities) < 2:
        return classes
    able = able_to_train(offer, fleet, profile)
    if offer.task_type.generates:
        able = {name: ability for name, ability in able.items() if ability.no_sandbox is None}
    if not able:
        return classes
    return [nodes for nodes in classes if nodes.backend in able or nodes.backend not in fleet.abilities]


def _unplanned(
    text: str, way: str, refusal: Refusal | None = None, plan: PlanSummary | None = None
) -> FitResult:
    public = _REFUSED_PLANS[refusal].public if refusal else ""
    no_place = RuleVerdict(False, "not searched for: there is no plan", "a feasible plan")
    return FitResult(no_place, RuleVerdict(False, text, way, public), refusal, plan)


def _planned(plan: PlanSummary) -> RuleVerdict:
    text = (
        f"{plan.gpus}x{plan.gpu_kind} for {show_seconds(plan.total_s)}, {plan.epochs:.2g} epochs "
        f"({plan.share:.0%} of the profile's target), ends {show_seconds(plan.slack_s)} before the reserve"
    )
    return RuleVerdict(True, text)


@dataclass
class _FitSearch:
    """The search for the best place on nodes of one class."""

    offer: ParsedOffer
    now: float
    fleet: FleetSnapshot
    terms: FitTerms
    profile: ResolvedProfile
    nodes: NodeClass
    places: PlacementSearch
    worth: TrainingWorth
    #: The first place for all GPUs of the full plan, whatever the wait; known once they are not free now.
    earliest: Placement | None = None
    lane: NamedLane | None = None
    _known_windows: dict[tuple[int, float], list[Placement]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        targets = self.profile.targets
        self.hardware = self.nodes.of_nodes(targets.nodes)
        if targets.gpu_strategy is GpuStrategy.LANES:
            self.lane = lane_for(targets, self.offer.model, self.offer.task_type)

    def no_gpu_in_time(self) -> RuleVerdict | None:
        """Return the verdict if no plan could be placed: not a single GPU is free early enough."""
        shortest = max(self.terms.start_delay, 1.0)
        soonest = min((window.starts_at for window in self._windows(1, shortest)), default=None)
        wait = None if soonest is None else soonest - self.now
        if wait is not None and wait <= self.terms.max_wait:
            return None
        return self.none_free("not planned: no GPU", " is free", wait)

    def plan(self, gpus: int, wait_s: float = 0.0) -> PlanSummary:
        offer, hardware = self.offer, self.hardware
        # Whole minutes: moments differ, plans need not.
        hours = offer.hours if wait_s <= 0 else offer.hours - math.ceil(wait_s / 60) / 60
        if gpus != hardware.gpus.count:
            hardware = hardware.model_copy(update={"gpus": hardware.gpus.take(gpus)})
        return quick_plan(
            offer.model,
            hours,
            offer.task_type,
            hardware,
            self.profile,
            image_type=offer.image_type,
            rows=offer.rows,
            stated_params=offer.planned_params,
            worth=self.worth,
        )

    def too_much_data(self, plan: PlanSummary) -> str | None:
        """Return why DPO's pass of the reference model takes too long; an offer does not state its rows.

        Training on them can be cut short, but not that pass over all of them: it must leave time with the
        largest dataset too.
        """
        if not plan.reference_s or not plan.rows:
            return None
        rows = next(rows for hours, rows in _MAX_ROWS if self.offer.hours <= hours)
        longer = plan.reference_s * max(rows / plan.rows - 1, 0.0)
        late = plan.around_s + longer - plan.budget_s
        if late < 0:
            return None
        return (
            f"with {rows:,} rows, as many as validators give {self.offer.hours:g} h, the pass of the "
            f"reference model over them would end {show_seconds(late)} too late to train"
        )

    def best(self, full: PlanSummary) -> PlacedPlan | None:
        """The full plan at once; else whatever is worth most, or trains most."""
        at_once = self._place_now(full)
        if at_once is not None:
            return full, at_once
        windows = self._windows(full.gpus, self._seconds(full))
        self.earliest = min(windows, key=lambda window: window.starts_at, default=None)
        options = [option for option in (self._after_waiting(full), self._on_fewer(full)) if option]
        by_value = self.profile.targets.gpu_strategy is GpuStrategy.BY_VALUE

        def preferred(option: PlacedPlan) -> tuple[float, float]:
            plan, placement = option
            value = self.worth.net(plan.share, plan.gpus, plan.total_s / 3600)
            return value if by_value else plan.share, -placement.starts_at

        return max(options, key=preferred, default=None)

    def _after_waiting(self, full: PlanSummary) -> PlacedPlan | None:
        """Take the same GPUs when they are free, with the hours that are left by then."""
        earliest, wait = self.earliest, self.wait_s
        if earliest is None or wait is None or wait > self.terms.max_wait:
            return None
        plan = self.plan(full.gpus, wait)
        if not self._is_feasible(plan) or plan.gpus != full.gpus:
            return None
        end = earliest.starts_at + self._seconds(plan, wait)
        return plan, Placement(earliest.gpus, earliest.starts_at, end, earliest.why)

    @property
    def wait_s(self) -> float | None:
        """Seconds until the full plan's number of GPUs is free, if that is before the task's deadline."""
        return None if self.earliest is None else max(self.earliest.starts_at - self.now, 0.0)

    def _on_fewer(self, full: PlanSummary) -> PlacedPlan | None:
        """Try half of the GPUs, a quarter …: the first number that is free and can do it."""
        count = full.gpus // 2
        while self.terms.fewer_gpus and self.lane is None and count >= 1:
            if self._free_now(count, self._seconds(full)) is not None:
                plan = self.plan(count)
                placement = self._place_now(plan) if self._is_feasible(plan) else None
                if placement is not None:
                    return plan, placement
            count //= 2
        return None

    def _is_feasible(self, plan: PlanSummary) -> bool:
        return plan.feasible and self.too_much_data(plan) is None

    def _place_now(self, plan: PlanSummary) -> Placement | None:
        return self._free_now(plan.gpus, self._seconds(plan))

    def _free_now(self, count: int, seconds: float) -> Placement | None:
        windows = self._windows(count, seconds)
        return next((window for window in windows if window.starts_at <= self.now), None)

    def _windows(self, count: int, seconds: float) -> list[Placement]:
        """The earliest windows up to the deadline in each pool of GPUs, preferred pools first. They are
        searched for once and answer for every limit."""
        key = (count, seconds)
        if key not in self._known_windows:
            deadline = self.now + max(self.offer.hours, 0.0) * 3600
            options = self.places.options(
                self.nodes.option(count), duration_s=seconds, latest_start=deadline, lane=self.lane
            )
            self._known_windows[key] = list(options)
        return self._known_windows[key]

    def none_free(self, what: str, verb: str, wait_s: float | None, also: str = "") -> RuleVerdict:
        names = self.nodes.names
        held = {gpu for hold in self.fleet.reservations for gpu in hold.gpus if node_of(gpu) in names}
        usable = sum(len(node.usable) for node in self.fleet.inventory.gpus_by_node if node.node in names)
        where, count = "", f"{len(held)} of {usable} held"
        if self.lane is not None:
            name, lane = self.lane
            where = f" of lane {name}{' or beyond it' if lane.overflow else ''}"
        if wait_s is None:
            text = f"{what}{where}{verb} before its deadline{also}; {count}"
            return RuleVerdict(False, text, "GPUs that are free earlier")
        text = f"{what}{where}{verb} within {show_seconds(self.terms.max_wait)}{also}; {count}"
        way = f"fitting.max_wait of {math.ceil(wait_s / 60)}m, if the time after it is enough, or free GPUs"
        return RuleVerdict(False, f"{text}; free in {show_seconds(wait_s)}", way)

    def _seconds(self, plan: PlanSummary, wait_s: float = 0.0) -> float:
        """Seconds to hold the GPUs: the plan and something to spare, but not beyond the deadline, and all of
        it a little longer since the start, and with it the deadline, comes later than the offer."""
        until_deadline = self.offer.hours * 3600 - wait_s
        return min(plan.total_s * (1 + self.terms.spare), until_deadline) + self.terms.start_delay
