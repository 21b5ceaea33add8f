"""The nodes of a cluster: a line for all of a size, and a table of those with our jobs or out of use."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from urllib.parse import quote

from miner.api.fleet import FleetClaim, FleetGpu, FleetStatus, NodeStatus
from miner.dashboard.parts import (
    Column,
    Table,
    Text,
    Tone,
    box,
    clock,
    panel,
    set_visible,
    short_model,
    until,
)
from miner.fleet.node_view import node_classes, nodes_to_show


class NodeTable:
    """A table of nodes; hidden without a cluster."""

    def __init__(self) -> None:
        with box() as self._all, panel("Nodes", note="their GPUs are not measured by this daemon"):
            self._summary = Text("", "", "p")
            self._summary.style("white-space:pre-line")
            self._table: Table[NodeStatus] = Table(
                "Nodes",
                [
                    Column("Node", "name", classes="nowrap"),
                    Column("GPUs", lambda one: f"{one.gpus}x{one.kind}", classes="wide-only nowrap"),
                    Column("Ours", "ours", number=True),
                    Column("Others'", "others", number=True),
                    Column("Free", "free", number=True, classes="wide-only"),
                    Column("Next free", "until", until, classes="wide-only nowrap"),
                    Column("State", _state, classes="why"),
                ],
                key=attrgetter("name"),
            )
            self._more = Text("", "small muted", "p")
        set_visible(self._all, False)

    def show(self, fleet: FleetStatus) -> None:
        nodes = fleet.nodes
        classes = node_classes(nodes)
        set_visible(self._all, bool(nodes) or bool(fleet.notes))
        self._summary.show("\n".join([*map(_class_text, classes, classes.values()), *fleet.notes]))
        shown = nodes_to_show(nodes)
        self._table.show(shown)
        left = len(nodes) - len(shown)
        self._more.show(f"{left} more: `god-miner fleet show --node NAME` shows one" if left else "")
        set_visible(self._more, left > 0)


def gpu_name(gpu: FleetGpu) -> str:
    """The number of a GPU; of a cluster's GPU, its id with the node."""
    return str(gpu.id if gpu.node else gpu.index)


def gpus_at_work(fleet: FleetStatus) -> str:
    """The number of GPUs with a job of ours; the overview has those of nodes only as counts."""
    here = [gpu for gpu in fleet.gpus if not gpu.node]
    busy = sum(gpu.task_id is not None for gpu in here) + sum(one.ours for one in fleet.nodes)
    text = f"{busy} of {len(here) + sum(one.gpus for one in fleet.nodes)} GPUs at work"
    reserved = sum(gpu.task_id is None and gpu.claim is not None for gpu in fleet.gpus)
    return f"{text}, {reserved} reserved" if reserved else text


def claim_name(claim: FleetClaim) -> str:
    """`#3 Llama-8B`, or `offer Llama-8B`."""
    what = f"#{claim.job_id}" if claim.job_id else str(claim.kind)
    return f"{what} {short_model(claim.model or claim.task_id[:8])}"


def claim_path(claim: FleetClaim) -> str:
    return f"/{claim.kind}s/{quote(claim.task_id, safe='')}"


def reserved_text(claim: FleetClaim, now: float) -> str:
    """Show the start of a reservation, unless it has begun, and its end."""
    begins = f" from {clock(claim.starts_at)}" if claim.starts_at > now + 60 else ""
    return f"reserved{begins} until {clock(claim.ends_at)}"


def _class_text(name: str, count: Mapping[str, int]) -> str:
    text = "{nodes} of {name}: of {gpus} GPUs {ours} are ours, {others} others', {free} free".format(
        name=name, **count
    )
    return f"{text}; {count['out']} take no jobs" if count["out"] else text


def _state(node: NodeStatus) -> tuple[str, Tone]:
    if node.out:
        return node.state, "bad"
    return node.state, "live" if node.ours else "muted"
