"""Fleets to place things on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.hardware import KINDS, GpuSet, Hardware
from miner.fleet.base import FleetSnapshot, Gpu, Hold, HoldKind, NamedLane, Placement, TaskKey
from miner.fleet.placing import Placing

H100 = KINDS["H100-SXM"]
HOUR = 3600.0


def cards(
    count: int, *, links: Iterable[tuple[int, int]] | None = None, out: Iterable[int] = ()
) -> list[Gpu]:
    """`g0`, `g1`, …; all linked to all unless links are given."""
    pairs = [(a, b) for a in range(count) for b in range(count)] if links is None else list(links)
    linked: dict[int, set[str]] = {index: set() for index in range(count)}
    for a, b in pairs:
        if a != b:
            linked[a].add(f"g{b}")
            linked[b].add(f"g{a}")
    gone = set(out)
    return [
        Gpu(f"g{index}", index, H100, frozenset(linked[index]), "broken" if index in gone else None)
        for index in range(count)
    ]


def hold(
    gpus: Sequence[int], start: float, end: float, *, kind: HoldKind = HoldKind.JOB, task: str = ""
) -> Hold:
    key = TaskKey("validator", task or f"task-{'-'.join(map(str, gpus))}-{start:g}")
    return Hold(key, kind, tuple(f"g{index}" for index in gpus), start, end)


def fleet(gpus: Sequence[Gpu], holds: Sequence[Hold] = (), now: float = 0.0) -> FleetSnapshot:
    usable = [gpu for gpu in gpus if gpu.out is None]
    hardware = Hardware(gpus=GpuSet(kind=H100, count=len(usable))) if usable else None
    return FleetSnapshot(tuple(gpus), tuple(holds), hardware, now)


def place(
    snapshot: FleetSnapshot,
    counts: Sequence[int],
    *,
    now: float,
    duration_s: float,
    latest_start: float,
    lane: NamedLane | None = None,
) -> Placement | None:
    """What a task would take that asks for the first of these numbers that can be had."""
    placing = Placing(snapshot, now)
    found = (
        one
        for count in counts
        for one in placing.options(count, duration_s=duration_s, latest_start=latest_start, lane=lane)
    )
    return next(found, None)
