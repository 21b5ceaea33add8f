"""Name a task and the GPUs reserved for it: shared by offers, jobs, the store, the fleet and backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from core.domain.selectors import Lane

#: The pretended GPU of a host without any. Where several are configured, the others are `cpu:1`, `cpu:2`…
CPU_ID = "cpu"


def gpu_on_node(index: int | str, node: str) -> str:
    """The id of a GPU of a cluster's node, such as `0@n1`. GPUs of this machine have no node in theirs."""
    return f"{index}@{node}"


def node_of(gpu: str) -> str:
    """The node in a GPU's id; "" for this machine."""
    return gpu.partition("@")[2]


def nodes_of(gpus: Iterable[str]) -> tuple[str, ...]:
    """The nodes of these GPUs, each once, in order."""
    return tuple(dict.fromkeys(map(node_of, gpus)))


#: A lane and its name in the profile, as `core.planning.search.gpu_count.lane_for` finds them.
NamedLane = tuple[str, Lane]


class TaskKey(NamedTuple):
    """A task's id and its validator: two validators may use the same id."""

    validator: str
    task_id: str


class ReservationKind(StrEnum):
    OFFER = "offer"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class GpuReservation:
    """GPUs reserved for a task in a window, which may begin later. Queued jobs have one too."""

    key: TaskKey
    kind: ReservationKind
    gpus: tuple[str, ...]
    starts_at: float
    ends_at: float
    priority: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The place and time at which a task would run."""

    gpus: tuple[str, ...]
    starts_at: float
    ends_at: float
    #: "lane large", "two linked GPUs", …
    why: str = ""
