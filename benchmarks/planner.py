"""Duration of a plan: at an offer (only name, size and hours are known) and for a task that starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, product
from random import Random
from statistics import median, quantiles

from benchmarks.report import Report
from core.data.facts import assumed_facts
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import OFFERED_TASKS, ImageModelType, TaskType
from core.domain.units import parse_params
from core.domain.wire import MinerTaskOffer
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import PlanSummary, plan_task, quick_plan
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from miner.dev.samples import unknown_task
from miner.offers.parsed_offer import parse_offer

PROFILES = {"h100x4": "4xH100", "h100x4-strategy": "4xH100", "h100x8": "8xH100", "steady": "4xH100"}
SIZES = ("1b", "3b", "8b", "14b", "32b", "70b")
HOURS = (1.0, 3.0, 6.0)
TASKS = OFFERED_TASKS
#: What is to hold, in ms.
BARS = {"quick": 2.0, "final": 20.0}

Planned = Callable[[], TrainingPlan | PlanSummary]


def run(quick: bool) -> Report:
    rounds = 3 if quick else 20
    report = Report(
        "Planning: every task type at six sizes and three deadlines, model names never seen before",
        ("profile", "plan", "median ms", "p95 ms", "p99 ms", "worst ms", "feasible"),
    )
    everything: dict[str, list[float]] = {"quick": [], "final": []}
    for name, gpus in PROFILES.items():
        profile, hardware = load_profile(name), Hardware(gpus=parse_gpus(gpus))
        for kind, calls in (("quick", _quick(profile, hardware)), ("final", _final(profile, hardware))):
            taken, feasible = _measure(calls, rounds)
            everything[kind] += taken
            report.rows.append((name, kind, *_figures(taken), f"{feasible:.0%}"))
            report.data[f"{name}/{kind}"] = taken
    profile, hardware = load_profile("h100x8"), Hardware(gpus=parse_gpus("8xH100"))
    taken, feasible = _measure([_all_new(profile, hardware)] * 100, rounds)
    report.rows.append(("h100x8", "quick, all new", *_figures(taken), f"{feasible:.0%}"))
    report.data["all new"] = taken
    report.notes.append(
        f"quick plan, facts and profile with it, of offers that are new in everything: median "
        f"{median(taken):.2f} ms, the bar is {BARS['quick']:g} ms."
    )
    for kind, taken in everything.items():
        report.rows.append(("all", kind, *_figures(taken), ""))
        report.notes.append(f"{kind} plan: median {median(taken):.2f} ms, the bar is {BARS[kind]:g} ms.")
    report.notes.append(
        "A final plan carries its explanations: reasons, notes, memory and time term by term."
    )
    return report


def _figures(taken: list[float]) -> tuple[str, ...]:
    cuts = quantiles(taken, n=100)
    return f"{median(taken):.2f}", f"{cuts[94]:.2f}", f"{cuts[98]:.2f}", f"{max(taken):.1f}"


def _measure(calls: list[Callable[[int], Planned]], rounds: int) -> tuple[list[float], float]:
    """Each call gets a number of its own, so that no cache has seen its model."""
    numbers = count()
    taken, feasible = [], []
    for _ in range(rounds):
        for make in calls:
            call = make(next(numbers))
            began = time.perf_counter()
            found = call()
            taken.append((time.perf_counter() - began) * 1e3)
            feasible.append(found.feasible if isinstance(found, PlanSummary) else found.verdict.feasible)
    return taken, sum(feasible) / len(feasible)


def _all_new(profile: LoadedProfile, hardware: Hardware) -> Callable[[int], Planned]:
    """The stream that `offers` sends."""
    random = Random(56)

    def offered(_: int) -> Planned:
        parsed = parse_offer(MinerTaskOffer(**unknown_task(random).offer()))

        def quick() -> PlanSummary:
            return quick_plan(
                parsed.model,
                parsed.hours,
                parsed.task_type,
                hardware,
                resolve_profile(profile, parsed.task_type, parsed.model),
                image_type=parsed.image_type,
                rows=parsed.rows,
                stated_params=parsed.planned_params,
            )

        return quick

    return offered


def _quick(profile: LoadedProfile, hardware: Hardware) -> list[Callable[[int], Planned]]:
    def make(task: TaskType, size: str, hours: float) -> Callable[[int], Planned]:
        image = ImageModelType.FLUX if not task.is_text else None

        def numbered(number: int) -> Planned:
            # Counts that differ a little, so that no two models have one shape.
            params = parse_params(size) + 1000 * number

            def quick() -> PlanSummary:
                model = facts_from_name(f"someone/model-v{number}x-{size}", params, image)
                resolved = resolve_profile(profile, task, model)
                return quick_plan(model, hours, task, hardware, resolved, image_type=image)

            return quick

        return numbered

    return [make(*case) for case in product(TASKS, SIZES, HOURS)]


def _final(profile: LoadedProfile, hardware: Hardware) -> list[Callable[[int], Planned]]:
    """Facts are there already: reading config.json and counting tokens is the job's business."""

    def make(task: TaskType, size: str, hours: float) -> Callable[[int], Planned]:
        image = ImageModelType.SDXL if not task.is_text else None
        model = facts_from_name(f"llama-{size}", None, image)
        data = assumed_facts(task, 30 if image else 20_000, image_type=image)
        spec = TaskSpec(task_type=task, hours=hours, image_type=image)
        return lambda _: lambda: plan_task(spec, model, data, hardware, profile)

    return [make(*case) for case in product(TASKS, SIZES, HOURS)]
