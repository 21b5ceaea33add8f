"""Fleets to place tasks on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.domain.hardware import GPU_KINDS, GpuKind, GpuSet, Hardware
from core.domain.keys import GpuReservation, NamedLane, Placement, ReservationKind, TaskKey, gpu_on_node
from miner.fleet.base import FleetNode, FleetSnapshot, Gpu, GpuOption, InventoryState, group_by_node
from miner.fleet.placement import PlacementSearch

H100 = GPU_KINDS["H100-SXM"]
HOUR = 3600.0


def make_gpus(
    count: int,
    *,
    links: Iterable[tuple[int, int]] | None = None,
    unusable: Iterable[int] = (),
    node: str = "",
    kind: GpuKind = H100,
    busy: Mapping[int, tuple[float, float]] | None = None,
) -> list[Gpu]:
    """`g0`, `g1`, … or `g0@node`; all linked to all unless links are given. `busy`: when others use them."""
    names = [gpu_on_node(f"g{index}", node) if node else f"g{index}" for index in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count)] if links is None else list(links)
    linked: dict[int, set[str]] = {index: set() for index in range(count)}
    for a, b in pairs:
        if a != b:
            linked[a].add(names[b])
            linked[b].add(names[a])
    gone = set(unusable)
    return [
        Gpu(
            names[index],
            index,
            kind,
            frozenset(linked[index]),
            "broken" if index in gone else None,
            node,
            (busy[index],) if busy and index in busy else (),
        )
        for index in range(count)
    ]


def reservation(
    gpus: Sequence[int],
    start: float,
    end: float,
    *,
    kind: ReservationKind = ReservationKind.JOB,
    task: str = "",
) -> GpuReservation:
    key = TaskKey("validator", task or f"task-{'-'.join(map(str, gpus))}-{start:g}")
    return GpuReservation(key, kind, tuple(f"g{index}" for index in gpus), start, end)


def fleet(
    gpus: Sequence[Gpu], reservations: Sequence[GpuReservation] = (), now: float = 0.0
) -> FleetSnapshot:
    return FleetSnapshot(inventory_of(gpus), tuple(reservations), now)


def inventory_of(gpus: Sequence[Gpu], *, sees_memory: bool = False, **more: Any) -> InventoryState:
    """These GPUs and their nodes."""
    nodes = []
    for name, every, usable in group_by_node(gpus):
        installed = Hardware(gpus=GpuSet(kind=every[0].kind, count=len(every)))
        left = installed.model_copy(update={"gpus": installed.gpus.take(len(usable))}) if usable else None
        nodes.append(FleetNode(name, "slurm" if name else "", left, installed, sees_memory=sees_memory))
    return InventoryState(tuple(gpus), tuple(nodes), **more)


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
    placing = PlacementSearch(snapshot, now)
    placements = (
        placement
        for count in counts
        for placement in placing.options(
            GpuOption(count), duration_s=duration_s, latest_start=latest_start, lane=lane
        )
    )
    return next(placements, None)
