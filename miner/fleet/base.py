"""The types of the fleet: what policies, jobs and pages need to know of GPUs, without a library behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from core.domain.choices import Engine
from core.domain.hardware import GpuKind, GpuSet, Hardware
from core.domain.keys import GpuReservation, TaskKey


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
    #: The engine that runs trainings there, by name.
    engine: str
    #: With its usable GPUs only; None: none is usable.
    hardware: Hardware | None
    #: With all of its GPUs.
    installed: Hardware
    #: As its scheduler names it: "idle", "mixed", "drained: bad disk". Empty for this machine.
    state: str = ""


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

    gpus: tuple[Gpu, ...]
    reservations: tuple[GpuReservation, ...]
    #: The whole host as the planner wants it, with the usable GPUs only. None: nothing is usable.
    hardware: Hardware | None
    taken_at: float
    #: Why the last scan failed; the GPUs are those of the last one that did not.
    problem: str | None = None
    ability: EngineAbility = field(default_factory=EngineAbility)

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
