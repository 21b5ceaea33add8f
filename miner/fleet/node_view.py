"""Describe the nodes of a cluster as JSON: who uses how many of their GPUs, and which take no jobs."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from miner.fleet.base import FleetNode, Gpu, InventoryState
from miner.fleet.placement import FOREVER


def node_entries(inventory: InventoryState, ours: Container[str], now: float) -> list[dict[str, Any]]:
    """Every node but this machine. `ours`: the GPUs that our jobs have."""
    nodes = {node.name: node for node in inventory.nodes}
    return [
        _node_entry(nodes[group.node], group.every, ours, now)
        for group in inventory.gpus_by_node
        if group.node and group.node in nodes
    ]


def _node_entry(node: FleetNode, gpus: tuple[Gpu, ...], ours: Container[str], now: float) -> dict[str, Any]:
    used = sum(gpu.id in ours for gpu in gpus)
    others = [until for gpu in gpus if gpu.id not in ours and (until := busy_until(gpu, now)) is not None]
    out = [gpu for gpu in gpus if gpu.unusable_reason is not None]
    unused = [gpu for gpu in gpus if gpu.id not in ours and busy_until(gpu, now) is None]
    return {
        "name": node.name,
        "engine": node.engine,
        "kind": node.installed.gpus.kind.name,
        "state": node.state,
        "gpus": len(gpus),
        "ours": used,
        "others": len(others),
        "free": sum(gpu.unusable_reason is None for gpu in unused),
        # The next of others' GPUs that is free again; null: none, or not in sight.
        "until": min((until for until in others if until != FOREVER), default=None),
        "out": out[0].unusable_reason if len(out) == len(gpus) else None,
        "cpu_cores": node.installed.cpu_cores,
        "memory_bytes": node.installed.memory_bytes,
    }


def busy_until(gpu: Gpu, now: float) -> float | None:
    """When others stop using it, if they do now."""
    return next((until for begins, until in gpu.busy if begins <= now < until), None)


def windows(gpu: Gpu, now: float) -> list[dict[str, float | None]]:
    """When others use it from now on; without an end: null."""
    return [
        {"starts_at": begins, "ends_at": None if until == FOREVER else until}
        for begins, until in gpu.busy
        if until > now
    ]
