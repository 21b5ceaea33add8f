"""What the page says of a cluster's nodes."""

from __future__ import annotations

from miner.api.fleet import FleetGpu, FleetStatus, NodeStatus
from miner.dashboard.node_rows import _class_text, gpu_name, gpus_at_work
from miner.fleet.node_view import node_classes


def node(name: str, ours: int = 0, others: int = 0, out: str | None = None) -> NodeStatus:
    return NodeStatus(
        name=name,
        backend="slurm",
        kind="H100-SXM",
        state="idle",
        is_of_interest=True,
        gpus=8,
        ours=ours,
        others=others,
        free=0 if out else 8 - ours - others,
        until=None,
        out=out,
        cpu_cores=None,
        memory_bytes=None,
    )


NODES = [node("n1"), node("n2", others=3), node("n3", out="drained"), node("n4", ours=2)]
GPU = FleetGpu(
    id="GPU-1",
    index=3,
    node="",
    others=False,
    busy=[],
    kind="H100-SXM",
    memory="80GB",
    linked=[],
    out=None,
    unclean=False,
    shared=False,
    task_id="t",
    validator="v",
    job_id=1,
    until=None,
    claim=None,
    sample=None,
)


def test_nodes_of_a_size_are_one_line() -> None:
    ((name, count),) = node_classes(NODES).items()
    assert _class_text(name, count) == (
        "4 of 8xH100-SXM: of 32 GPUs 2 are ours, 3 others', 19 free; 8 take no jobs"
    )


def test_gpus_of_nodes_are_counted_and_named_with_their_node() -> None:
    of_node = GPU.model_copy(update={"id": "3@n4", "node": "n4"})
    fleet = FleetStatus(
        at=0.0,
        source="slurm",
        looked_at=None,
        trouble=None,
        notes=[],
        nodes=NODES,
        gpus=[GPU, of_node],
        claims=[],
    )
    assert gpus_at_work(fleet) == "3 of 33 GPUs at work"
    assert (gpu_name(GPU), gpu_name(of_node)) == ("3", "3@n4")
