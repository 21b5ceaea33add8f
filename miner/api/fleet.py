"""The fleet: nodes, GPUs, who has them, who waits, and what they measure."""

from __future__ import annotations

from core.domain.keys import ReservationKind
from miner.api.base import Answer
from miner.api.samples import GpuSample, HostSample


class GpuWindow(Answer):
    """A time in which others use a GPU; without an end: None."""

    starts_at: float
    ends_at: float | None


class FleetClaim(Answer):
    """A task's claim on GPUs: it runs on them, has them reserved, or waits."""

    job_id: int | None
    model: str | None
    validator: str
    task_id: str
    #: "running", "reserved" or "waiting".
    stage: str
    kind: ReservationKind
    gpus: list[str]
    starts_at: float
    ends_at: float
    priority: float
    accepted: bool
    #: Place in the queue.
    queue: int | None


class FleetGpu(Answer):
    id: str
    index: int
    node: str
    #: Others use it now, and when they will.
    others: bool
    busy: list[GpuWindow]
    kind: str
    memory: str
    #: Indices of the GPUs that it has a fast link to.
    linked: list[int]
    #: The reason that it takes no jobs.
    out: str | None
    #: Memory of its last job is not freed yet.
    unclean: bool
    shared: bool
    #: The task that runs on it.
    task_id: str | None
    validator: str | None
    job_id: int | None
    until: float | None
    #: The claim that runs on it, else its next reservation.
    claim: FleetClaim | None
    sample: GpuSample | None


class NodeStatus(Answer):
    """A node of a cluster."""

    name: str
    backend: str
    kind: str
    state: str
    #: It has jobs of ours, or takes none for a reason of its own, not by a limit for all.
    is_of_interest: bool
    gpus: int
    ours: int
    others: int
    free: int
    #: When the next of others' GPUs is free again, or None if that is not in sight.
    until: float | None
    out: str | None
    cpu_cores: int | None
    memory_bytes: int | None


class FleetStatus(Answer):
    """GPUs, who has them until when, what they measure, and what waits."""

    at: float
    source: str
    looked_at: float | None
    trouble: str | None
    notes: list[str]
    nodes: list[NodeStatus]
    gpus: list[FleetGpu]
    claims: list[FleetClaim]
    host: HostSample | None = None
