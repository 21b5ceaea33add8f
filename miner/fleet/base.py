"""The types of the fleet: what policies, jobs and pages need to know of GPUs, without a library behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from core.domain.choices import Engine
from core.domain.hardware import GpuKind, GpuSet, Hardware
from core.domain.keys import GpuReservation, TaskKey, nodes_of


@dataclass(frozen=True, slots=True)
class Gpu:
    #: What engines are given: the UUID, or the index where there is none; `cpu` for the pretend GPU.
    id: str
    index: int
    kind: GpuKind
    #: Ids of the GPUs that it has a fast link to.
    linked: frozenset[str] = frozenset()
    #: None: it may be used.
    unusable_reason: str | None = None
    #: The machine that it is in; "" is this one.
    node: str = ""
    #: When others use it, by what the cluster's scheduler knows: (from, until), in order.
    busy: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A machine with GPUs of one kind, planned by its own hardware."""

    #: "" is the daemon's machine.
    name: str
    #: The engine that runs trainings there, as ENGINE names it.
    engine: str
    #: With its usable GPUs only; None: none is usable.
    hardware: Hardware | None
    #: With all of its GPUs.
    installed: Hardware
    #: As its scheduler names it: "idle", "mixed", "drained: bad disk". Empty for this machine.
    state: str = ""
    #: Whether memory in use is known: if not, a released GPU counts as clean.
    sees_memory: bool = False


class NodeClass(NamedTuple):
    """Nodes that a plan cannot tell apart."""

    hardware: Hardware
    engine: str
    names: frozenset[str]


class NodeGpus(NamedTuple):
    """The GPUs of one node: all, and those that a task may use."""

    node: str
    every: tuple[Gpu, ...]
    usable: tuple[Gpu, ...]


class GpuOption(NamedTuple):
    """One way to run a task: so many GPUs of one node."""

    gpus: int
    #: One of these nodes; None: any.
    nodes: frozenset[str] | None = None
    #: Whole nodes instead of one, with as many of the GPUs in each.
    over: int = 1


def group_by_node(gpus: Iterable[Gpu]) -> tuple[NodeGpus, ...]:
    """The GPUs of each node, in the order in which the nodes come first."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.node, []).append(gpu)
    return tuple(
        NodeGpus(node, tuple(group), tuple([gpu for gpu in group if gpu.unusable_reason is None]))
        for node, group in groups.items()
    )


@dataclass(frozen=True)
class InventoryState:
    """What the inventory knows: every GPU, also those that may not be used, with their reason."""

    gpus: tuple[Gpu, ...] = ()
    #: The machines that they are in.
    nodes: tuple[FleetNode, ...] = ()
    #: GPU → what happened to it, for GPUs that no job can go on with.
    failed: Mapping[str, str] = field(default_factory=dict)
    #: GPUs with memory that their last job has not freed yet.
    unclean: frozenset[str] = frozenset()
    #: Used a little by somebody else.
    shared: frozenset[str] = frozenset()
    #: Why the last scan failed; the GPUs are those of the last one that did not.
    problem: str | None = None
    #: What the scan left out, and why.
    notes: tuple[str, ...] = ()

    @cached_property
    def gpus_by_node(self) -> tuple[NodeGpus, ...]:
        return group_by_node(self.gpus)

    @cached_property
    def classes(self) -> tuple[NodeClass, ...]:
        """The nodes with usable GPUs, grouped by their engine and hardware: the largest ones first."""
        groups: dict[tuple[object, ...], list[FleetNode]] = {}
        for node in self.nodes:
            if (has := node.hardware) is not None:
                # Machines of one order differ by a few megabytes.
                memory = f"{has.memory_bytes:.1e}"
                groups.setdefault((node.engine, has.gpus, has.cpu_cores, memory), []).append(node)
        classes = [
            NodeClass(
                min((node.hardware for node in group if node.hardware), key=lambda has: has.memory_bytes),
                group[0].engine,
                frozenset(node.name for node in group),
            )
            for group in groups.values()
        ]
        return tuple(sorted(classes, key=lambda one: _power(one.hardware), reverse=True))

    def nodes_like(self, gpus: Iterable[str]) -> frozenset[str] | None:
        """The nodes of the same class as those that these GPUs are in; None: the class is not known."""
        names = nodes_of(gpus)
        return next((one.names for one in self.classes if one.names.issuperset(names)), None)

    @property
    def hardware(self) -> Hardware | None:
        """The largest node with its usable GPUs only; None: no GPU is usable. Others may differ from it."""
        return self.classes[0].hardware if self.classes else None

    @cached_property
    def installed(self) -> Hardware | None:
        """The largest node with all of its GPUs, also those that are out for a while."""
        return max((node.installed for node in self.nodes), key=_power, default=None)


def _power(hardware: Hardware) -> tuple[float, int]:
    return hardware.gpus.count * hardware.gpus.kind.bf16_flops, hardware.gpus.memory_bytes


@dataclass(frozen=True, slots=True)
class EngineAbility:
    """What can be trained now, by what is known of the engine that runs trainings."""

    #: Why nothing can be trained at the moment; None: nothing is known against it.
    problem: str | None = None
    #: Why nothing is trained that brings code of strangers; None: there is a sandbox.
    no_sandbox: str | None = None
    #: By training engine: why it cannot train here.
    missing: Mapping[Engine, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at one instant, immutable: what a decision is made on."""

    inventory: InventoryState
    reservations: tuple[GpuReservation, ...]
    taken_at: float
    ability: EngineAbility = field(default_factory=EngineAbility)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.inventory.gpus

    @property
    def nodes(self) -> tuple[FleetNode, ...]:
        return self.inventory.nodes

    @property
    def problem(self) -> str | None:
        return self.inventory.problem

    @cached_property
    def usable(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.unusable_reason is None)


@dataclass(frozen=True, slots=True)
class GpuGrant:
    """GPUs that a job has now."""

    key: TaskKey
    ids: tuple[str, ...]
    gpus: GpuSet


GpuLostListener = Callable[[TaskKey, str, str], None]
