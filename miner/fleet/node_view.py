"""Describe the nodes of a cluster as JSON: who uses how many of their GPUs, and which take no jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

from miner.fleet.base import FleetNode, Gpu, InventoryState
from miner.fleet.placement import FOREVER

#: Nodes that are shown one by one.
MOST_SHOWN = 16


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
    others = [until for gpu in gpus if gpu.id not in ours and (until := gpu.busy_until(now)) is not None]
    reasons = [gpu.unusable_reason for gpu in gpus if gpu.unusable_reason is not None]
    out = reasons[0] if len(reasons) == len(gpus) else None
    unused = [gpu for gpu in gpus if gpu.id not in ours and gpu.busy_until(now) is None]
    return {
        "name": node.name,
        "engine": node.engine,
        "kind": node.installed.gpus.kind.name,
        "state": node.state if out is None or node.state in out else f"{node.state}; {out}",
        # It has jobs of ours, or takes none for a reason of its own, not by a limit for all.
        "is_of_interest": used > 0 or (out is not None and node.state in out),
        "gpus": len(gpus),
        "ours": used,
        "others": len(others),
        "free": sum(gpu.unusable_reason is None for gpu in unused),
        # The next of others' GPUs that is free again; null: none, or not in sight.
        "until": min((until for until in others if until != FOREVER), default=None),
        "out": out,
        "cpu_cores": node.installed.cpu_cores,
        "memory_bytes": node.installed.memory_bytes,
    }


def nodes_to_show(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All entries of a few nodes; of many those of interest, with jobs of ours first."""
    if len(nodes) <= MOST_SHOWN:
        return list(nodes)
    found = [one for one in nodes if one["is_of_interest"]]
    return sorted(found, key=lambda one: (-one["ours"], one["name"]))[:MOST_SHOWN]


def node_classes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """`8xH100-SXM` → how many `nodes` and `gpus` there are, `ours`, `others`, `free`, and in nodes that are
    `out`."""
    classes: dict[str, Counter[str]] = {}
    for one in nodes:
        count = classes.setdefault(f"{one['gpus']}x{one['kind']}", Counter())
        count.update({name: one[name] for name in ("gpus", "ours", "others", "free")})
        count["nodes"] += 1
        count["out"] += one["gpus"] if one["out"] else 0
    return dict(sorted(classes.items()))


def windows(gpu: Gpu, now: float) -> list[dict[str, float | None]]:
    """When others use it from now on; without an end: null."""
    return [
        {"starts_at": begins, "ends_at": None if until == FOREVER else until}
        for begins, until in gpu.busy
        if until > now
    ]
