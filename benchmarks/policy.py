"""Worth of a policy on a week of synthetic offers, against a stand-in for the reference miner's rule; and
how long a decision takes.

How value is modelled, and what that leaves out, stands in the notes under the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median, quantiles
from typing import NamedTuple

from benchmarks.report import Report
from core.config.files import ConfigLayer
from core.domain.choices import GpuStrategy
from core.domain.decisions import PlanBrief
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.models.names import family_from_name
from core.planning.planner import PlanSummary, quick_plan
from core.planning.search.timed_candidate import reserve_of
from core.profile.resolve import PROFILE_KIND, LoadedProfile, load_profile, resolve_profile
from core.profile.schema import ResolvedProfile
from miner.fleet.base import FleetSnapshot
from miner.offers.backtest.replay import ReplayedOffer, idle_fleet, replay
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.decide import decide, expected_value
from miner.offers.history import JobOutcome, SuccessChances, SuccessHistory
from miner.offers.parsed_offer import ParsedOffer, parse_offer
from miner.offers.past_offers import HistoricalOffer
from miner.offers.policies.load import load_policy

SEEDS = (1, 2, 3, 4, 5)
DAYS = 7.0
#: Offers a day: the rate that the bar is for, a low and a high one, and almost none.
RATES = (60.0, 20.0, 120.0, 5.0)
#: (GPUs, tuning profile, policies): each fleet is planned by one profile, the reference rule too.
FLEETS = (
    ("4xH100", "h100x4", ("h100x4",)),
    ("4xH100", "h100x4 by_size", ("h100x4",)),
    ("4xH100", "h100x4-strategy", ("h100x4", "everything-feasible", "conservative")),
    ("4xH100", "steady", ("h100x4",)),
    ("4xH100", "steady auto", ("h100x4",)),
    ("8xH100", "h100x8", ("h100x8", "everything-feasible")),
    ("8xH100", "h100x4-strategy", ("h100x4",)),
)
#: The strategies that `by_value` is compared with, by the second word of a subject.
STRATEGIES = {
    "auto": "{gpu_strategy: auto}",
    "by_size": "{gpu_strategy: by_size, gpus_by_size: [{above: 70B, gpus: 4}, {above: 35B, gpus: 2}]}",
}
#: Value per GPU-hour against the reference rule, at least.
BAR = 1.5
PAST_JOBS, RUNNING, DECIDE_BAR_MS = 10_000, 12, 5.0

#: Whose terms value all: the shipped beliefs, no history.
VALUE_POLICY = load_policy("base").terms


class Job(NamedTuple):
    """An accepted task as it would really run: planned with the dataset's true size."""

    points: float
    gpu_hours: float
    #: It ends in time with a model, however little of the data it saw.
    finishes: bool
    #: It sees as much of the data as the profile thinks worth submitting.
    worthwhile: bool


class Week(NamedTuple):
    accepted: int
    points: float
    gpu_hours: float
    unfinished: int
    meagre: int
    doubly_booked: int


def run(quick: bool) -> Report:
    seeds, rates = (SEEDS[:2], RATES[:1]) if quick else (SEEDS, RATES)
    report = Report(
        f"A week of offers, {len(seeds)} seeds: points per GPU-hour of the fleet",
        (
            "where",
            "policy",
            "accepted",
            "held",
            "points/GPU-h",
            "× reference",
            "least ×",
            "twice",
            "unfinished",
            "meagre",
        ),
    )
    for rate in rates:
        for gpus, profile, policies in FLEETS:
            _add_fleet(report, gpus, profile, policies, rate, seeds)
    _add_timing(report, 200 if quick else 1000)
    report.notes += _NOTES
    return report


def _add_fleet(
    report: Report, gpus: str, profile_name: str, policies: Sequence[str], rate: float, seeds: Sequence[int]
) -> None:
    profile, hardware = _profile(profile_name), Hardware(gpus=parse_gpus(gpus))
    offers = {seed: list(synthetic_offers(seed, days=DAYS, per_day=rate)) for seed in seeds}
    whole = hardware.gpus.count * DAYS * 24
    label = f"{gpus} {profile_name} {rate:g}/day"
    theirs = [_reference(offers[seed], profile, hardware) for seed in seeds]
    _add_row(report, label, "reference stand-in", theirs, theirs, whole)
    for name in policies:
        ours = [_ours(offers[seed], name, profile, hardware) for seed in seeds]
        _add_row(report, label, name, ours, theirs, whole)


def _profile(words: str) -> LoadedProfile:
    name, _, strategy = words.partition(" ")
    layers = load_profile(name).layers
    if strategy:
        text = f"extends: {name}\ntargets: {STRATEGIES[strategy]}"
        layers = (*layers, ConfigLayer(PROFILE_KIND, Path(f"{strategy}.yaml"), text))
    return LoadedProfile(name, layers)


def _add_row(
    report: Report, label: str, name: str, weeks: Sequence[Week], theirs: Sequence[Week], whole: float
) -> None:
    ratios = [
        our.points / their.points if their.points > 0 else float("inf")
        for our, their in zip(weeks, theirs, strict=True)
    ]
    report.rows.append(
        (
            label,
            name,
            f"{mean(week.accepted for week in weeks):.0f}",
            f"{mean(week.gpu_hours for week in weeks) / whole:.0%}",
            f"{mean(week.points for week in weeks) / whole:.3f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f}",
            str(sum(week.doubly_booked for week in weeks)),
            str(sum(week.unfinished for week in weeks)),
            str(sum(week.meagre for week in weeks)),
        )
    )
    report.data[f"{label}/{name}"] = {"weeks": [week._asdict() for week in weeks], "ratios": ratios}


def _ours(offers: Sequence[HistoricalOffer], name: str, profile: LoadedProfile, hardware: Hardware) -> Week:
    taken = [
        entry for entry in replay(offers, load_policy(name), profile, hardware) if entry.decision.accepted
    ]
    return _week([_job(entry, profile, hardware) for entry in taken], doubly_booked(taken))


def _week(jobs: Sequence[Job], twice: int) -> Week:
    return Week(
        accepted=len(jobs),
        points=sum(job.points for job in jobs),
        gpu_hours=sum(job.gpu_hours for job in jobs),
        unfinished=sum(not job.finishes for job in jobs),
        meagre=sum(not job.worthwhile for job in jobs),
        doubly_booked=twice,
    )


def doubly_booked(taken: Sequence[ReplayedOffer]) -> int:
    """Windows of one GPU that overlap."""
    windows: dict[str, list[tuple[float, float]]] = {}
    for entry in taken:
        placement = entry.decision.placement
        assert placement is not None
        for gpu in placement.gpus:
            windows.setdefault(gpu, []).append((placement.starts_at, placement.ends_at))
    return sum(
        later[0] < earlier[1] for each in windows.values() for earlier, later in pairwise(sorted(each))
    )


def _job(entry: ReplayedOffer, profile: LoadedProfile, hardware: Hardware) -> Job:
    """On its own GPUs, within its own window."""
    parsed, placement, brief = (
        parse_offer(entry.historical.offer),
        entry.decision.placement,
        entry.decision.plan,
    )
    assert placement is not None
    assert brief is not None
    resolved = resolve_profile(profile, parsed.task_type, parsed.model)
    left = parsed.hours - brief.wait_s / 3600
    window = placement.ends_at - placement.starts_at
    # The reserve is for the validator's deadline, not for the end of the window.
    hours = min(left, (window + reserve_of(resolved.limits, left * 3600)) / 3600)
    gpus = hardware.gpus.take(len(placement.gpus))
    gpu_hours = len(placement.gpus) * window / 3600
    return _trained(
        parsed, entry.historical, hours, hardware.model_copy(update={"gpus": gpus}), resolved, gpu_hours
    )


def _trained(
    parsed: ParsedOffer,
    historical: HistoricalOffer,
    hours: float,
    hardware: Hardware,
    profile: ResolvedProfile,
    gpu_hours: float | None,
) -> Job:
    """Value of a task in the end. Once accepted it trains as long as it can, however little that is."""

    def planned(with_profile: ResolvedProfile) -> PlanSummary:
        return quick_plan(
            parsed.model,
            hours,
            parsed.task_type,
            hardware,
            with_profile,
            image_type=parsed.image_type,
            rows=historical.rows,
            stated_params=parsed.planned_params,
        )

    plan = planned(profile)
    worthwhile = plan.feasible
    if not worthwhile:
        plan = planned(_undemanding(profile))
    held = gpu_hours
    if held is None:  # nobody else waits for its GPUs
        seconds = plan.total_s if plan.feasible else hours * 3600
        held = hardware.gpus.count * seconds / 3600
    if not plan.feasible:
        nothing = expected_value(parsed, VALUE_POLICY.value, _chances(parsed), None, held)
        return Job(-nothing.work * VALUE_POLICY.value.penalty, held, False, False)
    brief = PlanBrief(plan.gpus, plan.total_s, 0.0, plan.epochs, plan.share)
    value = expected_value(parsed, VALUE_POLICY.value, _chances(parsed), brief, held)
    return Job(value.points, held, True, worthwhile)


_NOBODY = SuccessHistory()


def _chances(parsed: ParsedOffer) -> SuccessChances:
    return _NOBODY.chances(parsed.kinds, parsed.model.family, parsed.params, VALUE_POLICY.success, 0.0)


def _undemanding(profile: ResolvedProfile) -> ResolvedProfile:
    return profile.model_copy(update={"limits": profile.limits.model_copy(update={"min_epochs": 0.0})})


def _reference(offers: Sequence[HistoricalOffer], profile: LoadedProfile, hardware: Hardware) -> Week:
    """Llama in the name, under 13 hours, one job at a time, on the whole host; nothing is planned before."""
    jobs, busy_until = [], 0.0
    for historical in offers:
        offer = historical.offer
        if "llama" not in offer.model.lower() or offer.hours_to_complete >= 13 or historical.at < busy_until:
            continue
        parsed = parse_offer(offer)
        resolved = resolve_profile(profile, parsed.task_type, parsed.model)
        targets = resolved.targets.model_copy(update={"gpu_strategy": GpuStrategy.ALL})
        whole = resolved.model_copy(update={"targets": targets})
        job = _trained(parsed, historical, parsed.hours, hardware, whole, None)
        busy_until = historical.at + 3600 * job.gpu_hours / hardware.gpus.count
        jobs.append(job)
    return _week(jobs, 0)


def _add_timing(report: Report, rounds: int) -> None:
    """Names that no cache has seen, as after a start; then the same offers again."""
    profile, policy = load_profile("h100x8"), load_policy("h100x8")
    hardware = Hardware(gpus=parse_gpus("8xH100"))
    fleet, history = _busy(hardware), _history()
    offers = [historical.offer for historical in synthetic_offers(99, days=rounds, per_day=1.0)][:rounds]
    fresh = [
        offer.model_copy(update={"model": f"someone/v{number}-{offer.model.rpartition('/')[2]}"})
        for number, offer in enumerate(offers)
    ]
    for label, asked in (("names never seen", fresh), ("names seen before", fresh)):
        taken, own = [], time.process_time()
        for offer in asked:
            began = time.perf_counter()
            decide(offer, 0.0, fleet, history, policy, profile)
            taken.append((time.perf_counter() - began) * 1e3)
        own = (time.process_time() - own) * 1e3 / len(asked)
        cuts = quantiles(taken, n=100)
        report.data[f"decide/{label}"] = taken
        report.notes.append(
            f"decide with {PAST_JOBS:,} past jobs and {RUNNING} running, {label}: median "
            f"{median(taken):.2f} ms, p95 {cuts[94]:.2f}, p99 {cuts[98]:.2f}; the bar is "
            f"{DECIDE_BAR_MS:g} ms. {own:.2f} ms of CPU each: what is above it is other programs' doing."
        )


def _busy(hardware: Hardware) -> FleetSnapshot:
    """Twelve tasks on eight GPUs: six run, six have their turn afterwards, two GPUs are free for an hour."""
    idle = idle_fleet(hardware)
    holds = [
        GpuReservation(
            TaskKey("v", f"job-{number}"),
            ReservationKind.JOB,
            (str(number),),
            -600.0,
            3600.0 + 600 * number,
            0.3,
        )
        for number in range(6)
    ]
    holds += [
        GpuReservation(
            TaskKey("v", f"next-{number}"), ReservationKind.OFFER, (str(number),), 7200.0, 14_400.0, 0.3
        )
        for number in range(6)
    ]
    assert len(holds) == RUNNING
    return FleetSnapshot(idle.inventory, tuple(holds), 0.0)


def _history() -> SuccessHistory:
    return SuccessHistory(_outcomes(Random(7)))


def _outcomes(draw: Random) -> Iterator[JobOutcome]:
    for number, historical in enumerate(synthetic_offers(7, days=PAST_JOBS, per_day=1.1)):
        if number == PAST_JOBS:
            return
        parsed = parse_offer(historical.offer)
        family = parsed.model.family if parsed.model.is_image else family_from_name(historical.offer.model)
        ended = historical.at - PAST_JOBS * 86_400
        published = draw.random() < 0.9
        yield JobOutcome(number, parsed.task_type, parsed.kinds[0], family, parsed.params, published, ended)


_NOTES = (
    "Value is a model, not income: points = work × (3 × success × win − penalty), work = max(1, "
    "2·√(hours·B)) as validators weigh tasks (docs/acceptance.md). Chances of success and of winning "
    "are the shipped policy's priors, for both sides alike; a training cut short wins less often (share "
    "of the profile's wish to the power of 0.3, GRPO 0.1). Who really wins, and how validators multiply "
    "a miner's sum by its average, is left out.",
    "Both sides train with the same profile and planner, on the dataset's true size, which a decision "
    "does not know. The stand-in takes text tasks with llama in the model's name under 13 hours, one at "
    "a time, gives each all GPUs, and plans nothing before it accepts.",
    "Types, sizes, hours and rows are drawn as the validators' scheduler draws them; how often one "
    "miner is asked is not known, so there are four rates. Every acceptance is followed by a start at "
    "once.",
    f"The bar is {BAR:g} × the reference at 60 offers a day. 'Unfinished': the planner has no training "
    "that ends in the window with the true rows. 'Meagre': fewer epochs than the "
    "profile's min_epochs, where the dataset is much larger than its hours let expect; still a valid "
    "submission.",
)
