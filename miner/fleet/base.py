"""The fleet's words: what policies, jobs and pages need to know of GPUs, without a library behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

from core.choices import Engine
from core.hardware import GpuKind, GpuSet, Hardware
from core.profile.targets import Lane

#: The pretend card of a host without one. Where several are asked for, the others are `cpu:1`, `cpu:2`…
CPU_ID = "cpu"

#: A lane and its name in the profile, as `core.planning.gpus.lane_for` finds them.
NamedLane = tuple[str, Lane]


class TaskKey(NamedTuple):
    """A task belongs to the validator who named it: two of them may use one id."""

    validator: str
    task_id: str


@dataclass(frozen=True, slots=True)
class Gpu:
    #: What engines are given: the UUID, or the index where there is none; `cpu` for the pretend card.
    id: str
    index: int
    kind: GpuKind
    #: Ids of the cards that it has a fast link to.
    linked: frozenset[str] = frozenset()
    #: Why it may not be used; None: it may.
    out: str | None = None


class HoldKind(StrEnum):
    OFFER = "offer"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Hold:
    """GPUs promised to a task in a window. An offer's window may begin later than now; a job waiting for its
    turn has a window too."""

    key: TaskKey
    kind: HoldKind
    gpus: tuple[str, ...]
    starts_at: float
    ends_at: float
    priority: float = 0.0


@dataclass(frozen=True, slots=True)
class Ability:
    """What the engine that runs trainings says of itself."""

    #: Why nothing can be trained at the moment; None: nothing is known against it.
    trouble: str | None = None
    #: Why nothing is trained that brings code of strangers; None: there is a sandbox.
    no_sandbox: str | None = None
    #: By training engine: why it cannot train here.
    lacks: Mapping[Engine, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetSnapshot:
    """The fleet at one instant, never changed: what a decision is made on."""

    gpus: tuple[Gpu, ...]
    holds: tuple[Hold, ...]
    #: The whole host as the planner wants it; `gpus.count` is the usable cards'. None: nothing is usable.
    hardware: Hardware | None
    taken_at: float
    #: Why the inventory could not be read this time; the cards are those of the last good look.
    trouble: str | None = None
    ability: Ability = field(default_factory=Ability)

    @cached_property
    def usable(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.out is None)

    def without(self, key: TaskKey) -> FleetSnapshot:
        holds = tuple(hold for hold in self.holds if hold.key != key)
        if len(holds) == len(self.holds):
            return self
        return replace(self, holds=holds)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a task would run, and when."""

    gpus: tuple[str, ...]
    starts_at: float
    ends_at: float
    #: "lane large", "two linked cards", …
    why: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """GPUs that a job has now."""

    key: TaskKey
    ids: tuple[str, ...]
    gpus: GpuSet


Lost = Callable[[TaskKey, str, str], None]


class Fleet(Protocol):
    """What a job asks of the fleet."""

    #: Told by whoever has the engine, for those who decide about offers.
    ability: Ability

    def snapshot(self, now: float) -> FleetSnapshot: ...

    def could_have(self, key: TaskKey) -> Hardware | None:
        """The host with as many GPUs as this job could be given if it waited its turn; for its final plan."""

    async def acquire(
        self,
        key: TaskKey,
        counts: Sequence[int],
        *,
        until: float,
        priority: float,
        exclusive: bool = False,
        lane: NamedLane | None = None,
    ) -> Grant:
        """Wait in the queue (by priority, ageing so that nobody starves) for as many GPUs as the first of
        `counts` that can be had now. Cancelling the wait leaves the queue; what was promised to the task
        stays promised until `release`. A job whose run has ended may ask again without `release`, for more,
        fewer or other GPUs. `until`: it is over by then at the latest; a promise's window stays as long as
        was planned. `priority`: of a task that came without a promise or a start; otherwise theirs stands.
        `exclusive`: only cards that nobody outside uses even a little."""

    def step_aside(self, key: TaskKey) -> bool:
        """The job's inputs do not come: whoever is ready may have its GPUs, until it asks for some itself.
        False: it had stepped aside already, or holds none."""

    def in_the_way(self, key: TaskKey) -> list[Hold]:
        """Who has the GPUs that a waiting job is to get, or is to have them before it."""

    def adopt(self, key: TaskKey, ids: Sequence[str], *, until: float) -> Grant | None:
        """After a restart: these are in use by a run that goes on. None when one of them is gone."""

    def extend(self, key: TaskKey, until: float) -> float:
        """Keep its GPUs for it until then, or until somebody else was promised one of them, and never shorter
        than so far: until when it has them now."""

    def release(self, key: TaskKey) -> None:
        """Safe to repeat."""

    def on_lost(self, told: Lost) -> None:
        """Call `told(key, gpu id, why)` when a GPU that a job holds fails or vanishes."""
