"""Describe the nodes of a cluster as JSON: the users of their GPUs, and nodes that take no jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from miner.api.fleet import GpuWindow, NodeStatus
from miner.fleet.base import FleetNode, Gpu, InventoryState
from miner.fleet.placement import FOREVER

#: Nodes that are shown one by one.
MOST_SHOWN = 16


def node_entries(inventory: InventoryState, ours: Container[str], now: float) -> list[NodeStatus]:
    """Every node but this machine. `ours`: the GPUs that our jobs have."""
    nodes = {node.name: node for node in inventory.nodes}
    return [
        _node_entry(nodes[group.node], group.every, ours, now)
        for group in inventory.gpus_by_node
        if group.node and group.node in nodes
    ]


def _node_entry(node: FleetNode, gpus: tuple[Gpu, ...], ours: Container[str], now: float) -> NodeStatus:
    used = sum(gpu.id in ours for gpu in gpus)
    others = [until for gpu in gpus if gpu.id not in ours and (until := gpu.busy_until(now)) is not None]
    reasons = [gpu.unusable_reason for gpu in gpus if gpu.unusable_reason is not None]
    out = reasons[0] if len(reasons) == len(gpus) else None
    unused = [gpu for gpu in gpus if gpu.id not in ours and gpu.busy_until(now) is None]
    return NodeStatus(
        name=node.name,
        backend=node.backend,
        kind=node.installed.gpus.kind.name,
        state=node.state if out is None or node.state in out else f"{node.state}; {out}",
        is_of_interest=used > 0 or (out is not None and node.state in out),
        gpus=len(gpus),
        ours=used,
        others=len(others),
        free=sum(gpu.unusable_reason is None for gpu in unused),
        until=min((until for until in others if until != FOREVER), default=None),
        out=out,
        cpu_cores=node.installed.cpu_cores,
        memory_bytes=node.installed.memory_bytes,
    )


def nodes_to_show(nodes: Sequence[NodeStatus]) -> list[NodeStatus]:
    """All entries of a few nodes; of many those of interest, with jobs of ours first."""
    if len(nodes) <= MOST_SHOWN:
        return list(nodes)
    of_interest = [node for node in nodes if node.is_of_interest]
    return sorted(of_interest, key=lambda node: (-node.ours, node.name))[:MOST_SHOWN]


def node_classes(nodes: Sequence[NodeStatus]) -> dict[str, Counter[str]]:
    """`8xH100-SXM` → how many `nodes` and `gpus` there are, `ours`, `others`, `free`, and in nodes that are
    `out`."""
    classes: dict[str, Counter[str]] = {}
    for node in nodes:
        count = classes.setdefault(f"{node.gpus}x{node.kind}", Counter())
        count.update({name: getattr(node, name) for name in ("gpus", "ours", "others", "free")})
        count["nodes"] += 1
        count["out"] += node.gpus if node.out else 0
    return dict(sorted(classes.items()))


def windows(gpu: Gpu, now: float) -> list[GpuWindow]:
    """When others use it from now on."""
    return [
        GpuWindow(starts_at=begins, ends_at=None if until == FOREVER else until)
        for begins, until in gpu.busy
        if until > now
    ]
