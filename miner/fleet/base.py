"""The types of the fleet: GPUs as policies, jobs and pages see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from core.domain.choices import Engine
from core.domain.hardware import GpuKind, GpuSet, Hardware
from core.domain.keys import GpuReservation, TaskKey, nodes_of


@dataclass(frozen=True, slots=True)
class Gpu:
    #: The name that backends are given: the UUID, the index if there is none, or `cpu` for the pretend GPU.
    id: str
    index: int
    kind: GpuKind
    #: Ids of the GPUs to which it has a fast link.
    linked: frozenset[str] = frozenset()
    #: The reason why it may not be used, if there is one.
    unusable_reason: str | None = None
    #: The machine that it is in; "" for this one.
    node: str = ""
    #: Times at which others use it, as the cluster's scheduler knows them: (from, until), in order.
    busy: tuple[tuple[float, float], ...] = ()
    #: The host's cores near it, as docker's cpuset; "" if unknown.
    cores: str = ""

    def busy_until(self, now: float) -> float | None:
        """Time until which others use it, if they do now."""
        return next((until for begins, until in self.busy if begins <= now < until), None)


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A machine with GPUs of one kind, planned by its own hardware."""

    #: "" is the daemon's machine.
    name: str
    #: The backend that runs trainings there, as BACKEND names it.
    backend: str
    #: With its usable GPUs only, or None if there are none.
    hardware: Hardware | None
    #: With all of its GPUs.
    installed: Hardware
    #: The scheduler's word for its state: "idle", "mixed", "drained: bad disk". Empty for this machine.
    state: str = ""
    #: True if memory in use is known; if not, a released GPU counts as clean.
    sees_memory: bool = False


class NodeGpus(NamedTuple):
    """The GPUs of one node: all, and those that a task may use."""

    node: str
    every: tuple[Gpu, ...]
    usable: tuple[Gpu, ...]


class GpuOption(NamedTuple):
    """One way to run a task: a number of GPUs of one node."""

    gpus: int
    #: One of these nodes; by default any.
    nodes: frozenset[str] | None = None
    #: The number of whole nodes, with an equal share of the GPUs in each.
    over: int = 1

    def is_met(self, gpus: Sequence[str]) -> bool:
        nodes = nodes_of(gpus)
        return (
            len(gpus) == self.gpus
            and len(nodes) == self.over
            and (self.nodes is None or self.nodes.issuperset(nodes))
        )


class NodeClass(NamedTuple):
    """Nodes that are equal for a plan."""

    #: The hardware of each.
    hardware: Hardware
    backend: str
    names: frozenset[str]

    def of_nodes(self, most: int) -> Hardware:
        """This class limited to `most` nodes, for a plan of several nodes."""
        gpus, nodes = self.hardware.gpus, min(len(self.names), most)
        if nodes == 1:
            return self.hardware
        together = GpuSet(kind=gpus.kind, count=gpus.count * nodes, nodes=nodes)
        return self.hardware.model_copy(update={"gpus": together})

    def option(self, gpus: int) -> GpuOption:
        """Ask for this number of GPUs in as few nodes as possible."""
        return GpuOption(gpus, self.names, -(-gpus // self.hardware.gpus.count))


def group_by_node(gpus: Iterable[Gpu]) -> tuple[NodeGpus, ...]:
    """Group GPUs by node, in the order in which the nodes first occur."""
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.node, []).append(gpu)
    return tuple(
        NodeGpus(node, tuple(group), tuple([gpu for gpu in group if gpu.unusable_reason is None]))
        for node, group in groups.items()
    )


@dataclass(frozen=True)
class InventoryState:
    """The inventory: every GPU, also those that may not be used, with the reason."""

    gpus: tuple[Gpu, ...] = ()
    #: The machines that they are in.
    nodes: tuple[FleetNode, ...] = ()
    #: Faults by GPU, of GPUs on which no job can continue.
    failed: Mapping[str, str] = field(default_factory=dict)
    #: GPUs with memory that their last job has not freed yet.
    unclean: frozenset[str] = frozenset()
    #: GPUs of which somebody else uses a little.
    shared: frozenset[str] = frozenset()
    #: The reason why the last scan failed, if it did; the GPUs are those of the last good one.
    problem: str | None = None
    #: The parts that the scan left out, and why.
    notes: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The kind of each GPU."""
        return {gpu.id: gpu.kind.name for gpu in self.gpus}

    @cached_property
    def gpus_by_node(self) -> tuple[NodeGpus, ...]:
        return group_by_node(self.gpus)

    @cached_property
    def classes(self) -> tuple[NodeClass, ...]:
        """The nodes with usable GPUs, grouped by their backend and hardware: the largest ones first."""
        groups: dict[tuple[object, ...], list[FleetNode]] = {}
        for node in self.nodes:
            if (has := node.hardware) is not None:
                # Machines of one order differ by a few megabytes.
                memory = f"{has.memory_bytes:.1e}"
                groups.setdefault((node.backend, has.gpus, has.cpu_cores, memory), []).append(node)
        classes = [
            NodeClass(
                min((node.hardware for node in group if node.hardware), key=lambda has: has.memory_bytes),
                group[0].backend,
                frozenset(node.name for node in group),
            )
            for group in groups.values()
        ]
        return tuple(sorted(classes, key=lambda group: _power(group.hardware), reverse=True))

    def node_with(self, gpus: Sequence[str]) -> FleetNode | None:
        """The first node that these GPUs are in."""
        name = next(iter(nodes_of(gpus)), None)
        return next((node for node in self.nodes if node.name == name), None)

    def nodes_like(self, gpus: Iterable[str]) -> frozenset[str] | None:
        """Return the nodes of the class of these GPUs' nodes, or None if the class is not known."""
        names = nodes_of(gpus)
        return next((group.names for group in self.classes if group.names.issuperset(names)), None)

    @property
    def hardware(self) -> Hardware | None:
        """The largest node with its usable GPUs only, if there are any. Other nodes may differ from it."""
        return self.classes[0].hardware if self.classes else None

    @cached_property
    def installed(self) -> Hardware | None:
        """The largest node with all of its GPUs, also those that are out for a while."""
        return max((node.installed for node in self.nodes), key=_power, default=None)


def _power(hardware: Hardware) -> tuple[float, int]:
    return hardware.gpus.count * hardware.gpus.kind.bf16_flops, hardware.gpus.memory_bytes


@dataclass(frozen=True, slots=True)
class BackendAbility:
    """The present ability of a backend."""

    #: The reason why nothing can be trained at the moment, if there is one.
    problem: str | None = None
    #: The reason why nothing is trained that brings third-party code, or None if there is a sandbox.
    no_sandbox: str | None = None
    #: The reason why an engine cannot train here.
    missing: Mapping[Engine, str] = field(default_factory=dict)


_ABLE = BackendAbility()


def joint_ability(abilities: Mapping[str, BackendAbility]) -> BackendAbility:
    """Combine the abilities of several backends."""
    working = [ability for ability in abilities.values() if ability.problem is None]
    if not working:
        problems = dict.fromkeys(ability.problem for ability in abilities.values() if ability.problem)
        return BackendAbility("; ".join(problems) or None)
    first, *others = working
    unsafe = [ability.no_sandbox for ability in working if ability.no_sandbox]
    return BackendAbility(
        None,
        "; ".join(dict.fromkeys(unsafe)) if len(unsafe) == len(working) else None,
        {
            engine: why
            for engine, why in first.missing.items()
            if all(engine in ability.missing for ability in others)
        },
    )


@dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at one instant, immutable, as the basis of a decision."""

    inventory: InventoryState
    reservations: tuple[GpuReservation, ...]
    taken_at: float
    #: By the backends that nodes name; of one that is not here nothing is known against it.
    abilities: Mapping[str, BackendAbility] = field(default_factory=dict)

    def ability_of(self, backend: str) -> BackendAbility:
        return self.abilities.get(backend, _ABLE)

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
