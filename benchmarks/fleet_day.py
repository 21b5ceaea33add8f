"""A simulated day of a large cluster: the daemon's decisions, reservations and queue on a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from core.domain.decisions import Decision, PlanBrief
from core.domain.hardware import GpuKind, Hardware, parse_gpus
from core.domain.keys import TaskKey, gpu_on_node
from core.planning.planner import quick_plan
from core.profile.resolve import load_profile, resolve_profile
from miner.fleet.base import FleetNode, Gpu, GpuGrant, GpuOption, InventoryState
from miner.fleet.fleet import Fleet
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.decide import decide, expected_value
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from miner.offers.past_offers import HistoricalOffer
from miner.offers.policies.load import load_policy

#: 1,000 GPUs: (nodes, GPUs of each, CPUs, bytes of memory).
NODES = ((100, "8xH100", 192, 2 * 10**12), (20, "4xH100", 96, 10**12), (15, "8xA100", 128, 10**12))
POLICY, PROFILE = "everything-feasible", "h100x4-strategy"
#: The part of the nodes on which others have some GPUs for hours.
OTHERS_SHARE = 0.1
#: How often the daemon looks whose turn it is although nothing has changed.
SCHEDULE_S = 60.0
DAY, HOUR = 86_400.0, 3600.0
#: After the fleet has filled up.
WARM_UP = 6 * HOUR
#: How real trainings differ from their plans.
SPREAD = (0.85, 1.04)


class TimedCalls:
    """Durations of calls, in ms of wall time and of CPU."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def add(self, call: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.cpu.append((time.process_time() - cpu) * 1e3)
        self.wall.append((time.perf_counter() - wall) * 1e3)
        return result


class DayEvent(NamedTuple):
    at: float
    number: int
    call: Callable[[], None]


@dataclass
class DayResult:
    offers: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    #: Within the measured hours: GPU-hours that jobs had, and that there were.
    used_hours: float = 0.0
    all_hours: float = 0.0
    points: float = 0.0
    #: From the start request to the GPUs.
    waits: list[float] = field(default_factory=list)
    late: int = 0
    most_running: int = 0
    decisions: TimedCalls = field(default_factory=TimedCalls)
    passes: TimedCalls = field(default_factory=TimedCalls)
    reserves: TimedCalls = field(default_factory=TimedCalls)
    grants: int = 0


def cluster(seed: int = 1) -> InventoryState:
    """1,000 GPUs of three kinds of nodes, some of them in use by others."""
    draw = Random(seed)
    gpus: list[Gpu] = []
    nodes: list[FleetNode] = []
    for count, text, cores, memory in NODES:
        found = parse_gpus(text)
        hardware = Hardware(gpus=found, cpu_cores=cores, memory_bytes=memory)
        for _ in range(count):
            name = f"n{len(nodes) + 1:03d}"
            nodes.append(FleetNode(name, "slurm", hardware, hardware, "mixed"))
            others = draw.randint(1, found.count) if draw.random() < OTHERS_SHARE else 0
            until = draw.uniform(HOUR, DAY)
            gpus += _gpus(name, found.kind, found.count, others, until)
    return InventoryState(tuple(gpus), tuple(nodes))


def _gpus(node: str, kind: GpuKind, count: int, others: int, until: float) -> list[Gpu]:
    names = [gpu_on_node(index, node) for index in range(count)]
    return [
        Gpu(
            name,
            index,
            kind,
            frozenset(names) - {name},
            node=node,
            busy=((0.0, until),) if index >= count - others else (),
        )
        for index, name in enumerate(names)
    ]


class SimulatedDay:
    def __init__(self, offers: Sequence[HistoricalOffer], hours: float, profile: str = PROFILE) -> None:
        self.now = 0.0
        self.result = DayResult()
        self.fleet = Fleet(cluster(), clock=lambda: self.now)
        self._offers, self._end = offers, hours * HOUR
        self._profile, self._policy = load_profile(profile), load_policy(POLICY)
        self._history = SuccessHistory()
        self._events: list[DayEvent] = []
        self._numbers = itertools.count()
        self._draw = Random(3)
        self._running: set[TaskKey] = set()

    def at(self, moment: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, DayEvent(moment, next(self._numbers), call))

    async def run(self) -> DayResult:
        for offer in self._offers:
            self.at(offer.at, lambda offer=offer: self._offer(offer))  # type: ignore[misc]
        self.at(SCHEDULE_S, self._look)
        while self._events and self._events[0].at <= self._end:
            event = heapq.heappop(self._events)
            self.now = event.at
            event.call()
            for _ in range(3):  # for the jobs that got their GPUs to notice
                await asyncio.sleep(0)
        self.result.all_hours = len(self.fleet.inventory.gpus) * max(self._end - WARM_UP, 0.0) / HOUR
        return self.result

    def _look(self) -> None:
        self.result.passes.add(self.fleet.schedule)
        self.at(self.now + SCHEDULE_S, self._look)

    def _offer(self, historical: HistoricalOffer) -> None:
        offer, result = historical.offer, self.result
        measured = self.now >= WARM_UP

        def decided() -> Decision:
            snapshot = self.fleet.snapshot(self.now)
            return decide(offer, self.now, snapshot, self._history, self._policy, self._profile)

        decision: Decision = result.decisions.add(decided) if measured else decided()
        result.offers += measured
        key = TaskKey("validator", offer.task_id)
        if not decision.accepted:
            if measured:
                result.refused[decision.failed[0].rule] += 1
            return
        placement = decision.placement
        assert placement is not None
        assert decision.plan is not None

        def reserve() -> bool:
            return self.fleet.reserve(key, placement, priority=decision.priority, lane=decision.lane)

        assert result.reserves.add(reserve) if measured else reserve()
        if measured:
            result.accepted += 1
            assert decision.value is not None
            result.points += decision.value.points
        seconds = decision.plan.busy_s
        start = self.now + self._draw.uniform(5, 120)
        count = len(placement.gpus)
        self.at(start, lambda: self._start(key, start + offer.hours_to_complete * HOUR, count, seconds))

    def _start(self, key: TaskKey, deadline: float, count: int, seconds: float) -> None:
        self.fleet.start(key, until=deadline)
        started = self.now
        counts = [count >> shift for shift in range(count.bit_length())]
        waiting = asyncio.ensure_future(
            self.fleet.acquire(key, [GpuOption(gpus) for gpus in counts], until=deadline)
        )

        def on_grant(task: asyncio.Task[GpuGrant]) -> None:
            if task.cancelled():
                return
            self._granted(key, len(task.result().ids), started, deadline, count, seconds)

        waiting.add_done_callback(on_grant)

    def _granted(
        self, key: TaskKey, gpus: int, started: float, deadline: float, planned: int, seconds: float
    ) -> None:
        result = self.result
        result.grants += 1
        result.waits.append(self.now - started)
        took = seconds * planned / gpus * self._draw.uniform(*SPREAD)
        end = min(self.now + took, deadline)
        result.late += self.now + took > deadline + 1
        inside = max(min(end, self._end) - max(self.now, WARM_UP), 0.0)
        result.used_hours += gpus * inside / HOUR
        self._running.add(key)
        result.most_running = max(result.most_running, len(self._running))
        self.at(end, lambda: self._over(key))

    def _over(self, key: TaskKey) -> None:
        self._running.discard(key)
        self.fleet.release(key)


def first_free_node(offers: Sequence[HistoricalOffer], hours: float, profile: str = PROFILE) -> DayResult:
    """The peer: take what a plan is feasible for on the first node with all its planned GPUs free now; never
    wait, reserve nothing ahead. Same profile, planner and lengths of trainings."""
    result, inventory = DayResult(), cluster()
    loaded, policy = load_profile(profile), load_policy(POLICY).terms
    history, draw, end = SuccessHistory(), Random(3), hours * HOUR
    busy = {gpu.id: gpu.busy[-1][1] if gpu.busy else 0.0 for gpu in inventory.gpus}
    by_node = {one.node: [gpu.id for gpu in one.every] for one in inventory.gpus_by_node}
    for historical in offers:
        now, parsed = historical.at, parse_offer(historical.offer)
        measured = now >= WARM_UP
        result.offers += measured
        resolved = resolve_profile(loaded, parsed.task_type, parsed.model, parsed.rows)
        plans: dict[Hardware, Any] = {}
        for node in inventory.nodes:
            free = [gpu for gpu in by_node[node.name] if busy[gpu] <= now]
            hardware = node.installed
            if not free:
                continue
            if hardware not in plans:
                plans[hardware] = quick_plan(
                    parsed.model,
                    parsed.hours,
                    parsed.task_type,
                    hardware,
                    resolved,
                    image_type=parsed.image_type,
                    rows=parsed.rows,
                    stated_params=parsed.planned_params,
                )
            plan = plans[hardware]
            if plan.feasible and len(free) >= plan.gpus:
                break
        else:
            continue
        length = min(plan.total_s * draw.uniform(*SPREAD), parsed.hours * HOUR)
        busy |= dict.fromkeys(free[: plan.gpus], now + length)
        result.used_hours += plan.gpus * max(min(now + length, end) - max(now, WARM_UP), 0.0) / HOUR
        if measured:
            result.accepted += 1
            chances = history.chances(parsed.kinds, parsed.model.family, parsed.params, policy.success, now)
            brief = PlanBrief(plan.gpus, plan.total_s, 0.0, plan.epochs, plan.share)
            value = expected_value(parsed, policy.value, chances, brief, plan.gpus * length / HOUR)
            result.points += value.points
    result.all_hours = len(inventory.gpus) * max(end - WARM_UP, 0.0) / HOUR
    return result


def offers_of_a_day(seed: int, hours: float, per_day: float) -> list[HistoricalOffer]:
    """Twice as many at noon as at midnight; every model's name is another, as for a daemon that has just
    started."""
    draw = Random(seed)
    found: list[HistoricalOffer] = []
    for offer in synthetic_offers(seed, days=hours / 24, per_day=per_day * 4 / 3):
        phase = abs(offer.at % DAY / DAY * 2 - 1)  # 1 at midnight, 0 at noon
        if draw.random() < 1 - phase / 2:
            name = f"someone/v{len(found)}-{offer.offer.model.rpartition('/')[2]}"
            found.append(
                HistoricalOffer(offer.at, offer.offer.model_copy(update={"model": name}), offer.rows)
            )
    return found
