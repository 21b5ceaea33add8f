"""Find the GPUs of a cluster: its nodes, and when others use them, by what Slurm knows.

Slurm gives a job some GPUs of a node, never certain ones. So a node has as many slots as GPUs, called `0@n1`,
`1@n1`…, and only their number counts: others' jobs are put on slots that our jobs do not have.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from core.domain.hardware import GpuKind, GpuSet, UnknownGpu, find_kind, from_nvml
from core.domain.keys import gpu_on_node
from miner.backends.registry import ClusterContext
from miner.backends.slurm.commands import QUERY_S, SlurmCommands, SlurmRefused, SlurmUnreachable
from miner.backends.slurm.nodes import (
    AllocatedJob,
    JobShare,
    SlurmNode,
    SlurmPartition,
    SlurmReservation,
    expand_hosts,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_reservations,
)
from miner.fleet.placement import FOREVER
from miner.fleet.sources import GpuScan, ScanFailed, ScannedGpu, ScannedNode, gpu_names, linked_ids
from miner.support.background import run_in_thread

BACKEND_NAME = "slurm"
#: A scan is four commands to a controller that the whole site shares: the driver's interval would be unfair.
REFRESH_S = 30.0
#: Minimum interval between rescans after our own jobs began or ended.
LEAST_S = 5.0
#: Step of a bound that moves with the clock: otherwise no two scans would be equal.
STEP_S = 600.0
_MIG_SLICE = re.compile(r"\d+g\.(\d+)gb", re.IGNORECASE)
_UNUSABLE = {
    "DOWN": "down",
    "ERROR": "in error",
    "FUTURE": "not there yet",
    "UNKNOWN": "unknown",
    "FAIL": "failing",
    "NOT_RESPONDING": "not responding",
    "INVALID_REG": "has less than slurm.conf says",
    "REBOOT_ISSUED": "restarting",
    "REBOOT_REQUESTED": "to be restarted",
    "POWERING_DOWN": "powering down",
    "POWER_DOWN": "powering down",
    "BLOCKED": "blocked",
}
#: Shown, and no obstacle: Slurm starts a node that is powered down for the job that it gets.
_SHOWN = {
    "POWERED_DOWN": "powered down",
    "POWERING_UP": "powering up",
    "MAINTENANCE": "maintenance",
    "MAINT": "maintenance",
    "RESERVED": "reserved",
    "PLANNED": "planned",
    "COMPLETING": "completing",
}
_RESERVED = frozenset({"MAINTENANCE", "MAINT", "RESERVED"})


@dataclass(frozen=True, slots=True)
class ClusterScope:
    """The part of the cluster that may be used, and what a job of ours asks for with each GPU."""

    #: Empty: the cluster's default.
    partitions: tuple[str, ...] = ()
    #: As Slurm writes them: `n[1-4],big7`; empty: all of the partitions.
    nodes: str = ""
    constraint: str = ""
    reservation: str = ""
    max_gpus: int | None = None
    cpus_per_gpu: int = 16
    memory_per_gpu: int = 64 * 10**9
    #: Of each node, instead of the real ones (`GPUS=cpu`).
    pretended: GpuSet | None = None


@dataclass(frozen=True, slots=True)
class _Answers:
    nodes: list[SlurmNode]
    jobs: list[AllocatedJob]
    reservations: list[SlurmReservation]
    partitions: list[SlurmPartition]


@dataclass(frozen=True, slots=True)
class _Limits:
    """The bounds of our jobs on the cluster's nodes."""

    #: Those that may be used, by name.
    partitions: Mapping[str, SlurmPartition]
    #: Ours, or None if SLURM_RESERVATION is not set.
    reservation: SlurmReservation | None
    others: Sequence[SlurmReservation]

    def of(self, node: SlurmNode) -> list[SlurmPartition]:
        return [partition for name, partition in self.partitions.items() if name in node.partitions]

    def windows(self, node: SlurmNode, now: float) -> list[Window]:
        """When none of the node's GPUs is ours."""
        reserved = (other for other in self.others if node.name in other.nodes)
        windows = [(other.starts_at, other.ends_at) for other in reserved]
        if self.reservation is not None:
            windows += [(0.0, self.reservation.starts_at), (self.reservation.ends_at, FOREVER)]
        longest = max((partition.longest_s for partition in self.of(node)), default=FOREVER)
        if longest < FOREVER:
            windows.append((now // STEP_S * STEP_S + longest, FOREVER))
        return [(start, end) for start, end in windows if end > start]


class SlurmGpuSource:
    def __init__(
        self,
        scope: ClusterScope,
        commands: SlurmCommands,
        own_jobs: str,
        cluster: ClusterContext,
    ) -> None:
        """`own_jobs`: what the names of our own jobs begin with."""
        self._scope, self._commands, self._own_jobs, self._cluster = scope, commands, own_jobs, cluster
        self._wanted = frozenset(expand_hosts(scope.nodes))
        self._last: GpuScan | ScanFailed | None = None
        self._asked_at = -FOREVER
        self._in_use: frozenset[str] = frozenset()
        #: Others' jobs stay on the slots that they were put on, and SLURM_MAX_GPUS keeps what it chose.
        self._slots: SlotsOfJobs = {}
        self._chosen: frozenset[str] = frozenset()

    async def scan(self) -> GpuScan:
        """The last answer again, until it is old or our own jobs have changed."""
        known = self._last.gpus if isinstance(self._last, GpuScan) else ()
        in_use = frozenset(gpu.id for gpu in known if self._cluster.is_in_use(gpu.id))
        age = time.monotonic() - self._asked_at
        if self._last is None or age >= (LEAST_S if in_use != self._in_use else REFRESH_S):
            try:
                self._last = await self._ask()
            except ScanFailed as error:
                self._last = error
            self._asked_at, self._in_use = time.monotonic(), in_use
        if isinstance(self._last, ScanFailed):
            raise self._last
        return self._last

    async def close(self) -> None:
        """Nothing is open."""

    async def _ask(self) -> GpuScan:
        run = self._commands.run
        show = ("--all", "--details", "--oneliner", "show")
        try:
            texts = await asyncio.gather(
                *(run("scontrol", *show, what) for what in ("nodes", "jobs", "reservations", "partitions"))
            )
            answers = await run_in_thread(lambda: _parse(*texts), QUERY_S, "what Slurm prints")
        except (SlurmUnreachable, SlurmRefused, TimeoutError) as error:
            raise ScanFailed(f"Slurm's nodes cannot be read: {error}") from error
        except (LookupError, ValueError) as error:
            # Nothing is left out: a job that is not seen would have its GPUs given away.
            raise ScanFailed(f"what scontrol prints is not understood: {error!r}") from error
        return self._scan_of(answers)

    def _scan_of(self, answers: _Answers) -> GpuScan:
        now, scope = self._cluster.clock(), self._scope
        limits = _limits(answers, scope)
        use = use_by_node(answers.jobs, self._own_jobs)
        gpus: list[ScannedGpu] = []
        nodes: list[ScannedNode] = []
        notes: list[str] = []
        slots: SlotsOfJobs = {}
        host = self._cluster.host()
        for node in sorted(answers.nodes, key=lambda node: node.name):
            if not self._is_meant(node, limits):
                continue
            try:
                counted = _gpus_of(node, scope, self._cluster.kinds())
            except UnknownGpu as error:
                notes.append(str(error))
                continue
            if counted is not None:
                mine, unused = counted
                scanned = self._scanned(node, mine, use.get(node.name, ()), limits, slots, now)
                gpus += scanned
                state = _state_of(node) + (f" (not used: {unused})" if unused else "")
                nodes.append(ScannedNode(node.name, BACKEND_NAME, _facts_of(node, host), state))
        self._slots = slots
        return GpuScan(
            tuple(self._limited(gpus, now)),
            source=_source_name(answers.nodes, limits),
            nodes=tuple(nodes),
            notes=tuple(notes),
        )

    def _is_meant(self, node: SlurmNode, limits: _Limits) -> bool:
        return (
            bool(limits.of(node))
            and (not self._wanted or node.name in self._wanted)
            and (limits.reservation is None or node.name in limits.reservation.nodes)
            and _has_features(node, self._scope.constraint)
        )

    def _scanned(
        self,
        node: SlurmNode,
        mine: _NodeGpus,
        use: Sequence[NodeUse],
        limits: _Limits,
        slots: SlotsOfJobs,
        now: float,
    ) -> list[ScannedGpu]:
        count = mine.gpus.count
        names = [gpu_on_node(name, node.name) for name in gpu_names(mine.gpus)]
        needs = SlotNeeds(
            names,
            mine.type,
            max(min(self._scope.cpus_per_gpu, node.cores // count), 1),
            min(self._scope.memory_per_gpu, (node.memory_bytes or 0) // count),
            bounds=limits.windows(node, now),
            whole_node=any(partition.is_exclusive for partition in limits.of(node)),
        )
        windows, put = slot_windows(node, needs, use, self._slots, self._cluster.is_in_use, now)
        slots |= put
        excluded = _why_not(node, limits, needs.bounds, now)
        return [
            ScannedGpu(
                name,
                index,
                mine.gpus.kind,
                linked_ids(mine.gpus, names, index),
                excluded=excluded,
                node=node.name,
                busy=windows[index],
            )
            for index, name in enumerate(names)
        ]

    def _limited(self, gpus: list[ScannedGpu], now: float) -> list[ScannedGpu]:
        """No more than SLURM_MAX_GPUS: what we have, then what was chosen before, then the emptiest nodes."""
        most = self._scope.max_gpus
        if most is None:
            return gpus
        busy = {gpu.id for gpu in gpus if any(start <= now < end for start, end in gpu.busy)}
        on_node = Counter(gpu.node for gpu in gpus if gpu.id in busy or gpu.excluded)
        ranked = sorted(
            gpus,
            key=lambda gpu: (
                not self._cluster.is_in_use(gpu.id),
                gpu.excluded is not None,
                gpu.id in busy,
                gpu.id not in self._chosen,
                on_node[gpu.node],
            ),
        )
        self._chosen = frozenset(gpu.id for gpu in ranked[:most])
        why = f"SLURM_MAX_GPUS={most}"
        return [gpu if gpu.id in self._chosen or gpu.excluded else replace(gpu, excluded=why) for gpu in gpus]


def _parse(nodes: str, jobs: str, reservations: str, partitions: str) -> _Answers:
    return _Answers(
        parse_nodes(nodes), parse_jobs(jobs), parse_reservations(reservations), parse_partitions(partitions)
    )


def _limits(answers: _Answers, scope: ClusterScope) -> _Limits:
    there = {partition.name: partition for partition in answers.partitions}
    names = scope.partitions or tuple(name for name, partition in there.items() if partition.is_default)
    if not names:
        raise ScanFailed("Slurm has no default partition: set SLURM_PARTITION to one of " + ", ".join(there))
    missing = [name for name in names if name not in there]
    if missing:
        raise ScanFailed(
            f"SLURM_PARTITION names {', '.join(missing)}, and Slurm has {', '.join(there) or 'none'}"
        )
    own = [known for known in answers.reservations if known.name == scope.reservation]
    if scope.reservation and not own:
        raise ScanFailed(f"SLURM_RESERVATION={scope.reservation}: Slurm has none of this name (any more)")
    others = [known for known in answers.reservations if known not in own]
    return _Limits({name: there[name] for name in names}, own[0] if own else None, others)


@dataclass(frozen=True, slots=True)
class _NodeGpus:
    #: Their type in Slurm, or None if they are pretended.
    type: str | None
    gpus: GpuSet


def _gpus_of(node: SlurmNode, scope: ClusterScope, kinds: Mapping[str, str]) -> tuple[_NodeGpus, str] | None:
    """Return the GPUs that count and a note on the others, or None if the node has no GPUs. `UnknownGpu` if
    their kind is unknown."""
    if scope.pretended is not None:
        return _NodeGpus(None, scope.pretended), ""
    if not node.gpus:
        return None
    main = node.main_gpu_type
    unused = ", ".join(f"{count} {kind or 'gpu'}" for kind, count in node.gpus.items() if kind != main)
    if not node.gpus[main]:
        return None
    return _NodeGpus(main, GpuSet(kind=_kind_of(node, main, kinds), count=node.gpus[main])), unused


def _facts_of(node: SlurmNode, host: Mapping[str, Any]) -> Mapping[str, Any]:
    facts = {**host, "cpu_cores": node.cores, "memory_bytes": node.memory_bytes, "cores": ()}
    return {name: value for name, value in facts.items() if value is not None}


def _kind_of(node: SlurmNode, slurm_type: str, kinds: Mapping[str, str]) -> GpuKind:
    named = kinds.get(node.name) or kinds.get(slurm_type or "gpu")
    # The memory of a slice is no word about the GPU that it is of: 3g.40gb of an A100 with 80 GB.
    candidates = [named] if named else [_MIG_SLICE.sub("", slurm_type), *sorted(node.features)]
    known = next((kind for name in candidates if name and (kind := find_kind(name))), None)
    if known is None:
        raise UnknownGpu(
            f"{node.name} is left out: Slurm calls its GPUs {slurm_type or 'gpu'!r}, which names no known "
            f"kind; say it in FLEET_FILE, as `kinds: {{{slurm_type or 'gpu'}: H100}}`"
        )
    part = _MIG_SLICE.search(slurm_type)
    if part is None:
        return known
    return from_nvml(known.name, int(part[1]) * 10**9, known.compute_capability, nvlink=False)


def _has_features(node: SlurmNode, constraint: str) -> bool:
    """`a&b`, `a,b` or `a|b`. What sbatch knows beyond that, it has to refuse itself."""
    if not constraint or re.search(r"[\[\]()*!]", constraint):
        return True
    return any(set(re.split("[&,]", one)) <= node.features for one in constraint.split("|"))


def _why_not(node: SlurmNode, limits: _Limits, bounds: Iterable[Window], now: float) -> str | None:
    """Why nothing may begin on the node; what runs there goes on."""
    partitions = limits.of(node)
    if not any(partition.state == "UP" for partition in partitions):
        return f"partition {partitions[0].name} is {partitions[0].state}"
    is_explained = limits.reservation is not None or any(start <= now < end for start, end in bounds)
    if node.states & (_UNUSABLE.keys() | {"DRAIN"}) or (node.states & _RESERVED and not is_explained):
        return _state_of(node)
    return None


def _state_of(node: SlurmNode) -> str:
    words = [text for name, text in _UNUSABLE.items() if name in node.states]
    if "DRAIN" in node.states:
        words.append("draining" if node.states & {"ALLOCATED", "MIXED", "COMPLETING"} else "drained")
    if not words:
        words = [name.lower() for name in ("IDLE", "MIXED", "ALLOCATED") if name in node.states]
        words += dict.fromkeys(text for name, text in _SHOWN.items() if name in node.states)
    text = ", ".join(words) or "+".join(sorted(node.states)).lower()
    return f"{text}: {node.reason}" if node.reason else text


def _source_name(nodes: Sequence[SlurmNode], limits: _Limits) -> str:
    versions = Counter(node.version for node in nodes if node.version)
    version = f" {versions.most_common(1)[0][0]}" if versions else ""
    return f"Slurm{version}, partition {', '.join(limits.partitions)}"


# When others use the GPUs


#: A job that is past its end goes on until Slurm has ended it: by how much is only known afterwards.
OVERTIME_S = 60.0
#: What the node counts as used, and no job accounts for.
UNKNOWN_JOB = "?"

Window = tuple[float, float]
#: Node and job → the slots that it was put on.
SlotsOfJobs = dict[tuple[str, str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The share of a node that one job has, in a window."""

    job: str
    share: JobShare
    is_running: bool
    is_ours: bool
    starts_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """A node's slots, and what a job of ours asks for with each."""

    names: Sequence[str]
    #: The GPUs' type in Slurm, or None for pretended ones, which nobody else counts.
    kind: str | None
    cores: int
    memory_bytes: int
    #: When the whole node is not ours.
    bounds: Sequence[Window] = ()
    #: A job gets all of the node, also the GPUs that it did not ask for.
    whole_node: bool = False


def use_by_node(jobs: Iterable[AllocatedJob], own_jobs: str) -> dict[str, list[NodeUse]]:
    use: dict[str, list[NodeUse]] = {}
    for job in jobs:
        is_ours = job.name.startswith(own_jobs)
        for node, share in job.shares.items():
            share_of_node = NodeUse(job.id, share, job.is_running, is_ours, job.starts_at, job.ends_at)
            use.setdefault(node, []).append(share_of_node)
    return use


def slot_windows(
    node: SlurmNode,
    needs: SlotNeeds,
    use: Sequence[NodeUse],
    before: Mapping[tuple[str, str], tuple[int, ...]],
    is_in_use: Callable[[str], bool],
    now: float,
) -> tuple[list[tuple[Window, ...]], SlotsOfJobs]:
    """Return the windows in which each slot is not ours, and the slots that each job was put on.

    `before`: where the jobs were put last time."""
    ours = [index for index, name in enumerate(needs.names) if is_in_use(name)]
    windows: list[list[Window]] = [list(needs.bounds) for _ in needs.names]
    slots: SlotsOfJobs = {}
    if needs.whole_node and ours:
        own = [_with_end(job, now).ends_at for job in use if job.is_running and job.is_ours]
        for slot in set(range(len(needs.names))).difference(ours):
            windows[slot].append((0.0, max(own, default=FOREVER)))

    others = [job for job in use if not job.is_ours]
    kept = {slot for job in others for slot in before.get((node.name, job.job), ())}

    def put(job: str, count: int, window: Window, taken: Callable[[int], bool]) -> None:
        """On slots that are not ours: where it was, else where nobody was, the highest first."""
        had = before.get((node.name, job), ())

        def rank(slot: int) -> tuple[bool, bool, bool, bool, int]:
            return taken(slot), slot in ours, slot not in had, slot in kept, -slot

        chosen = sorted(range(len(needs.names)), key=rank)[:count]
        slots[node.name, job] = tuple(sorted(chosen))
        for slot in chosen:
            windows[slot].append(window)

    blocked: set[int] = set()
    running = [_with_end(job, now) for job in others if job.is_running]
    unknown = _unaccounted(node, needs, use, len(ours))
    if unknown:
        share = JobShare({needs.kind or "": unknown})
        running.append(NodeUse(UNKNOWN_JOB, share, True, False, 0.0, FOREVER))
    together: list[JobShare] = []
    running.sort(key=attrgetter("starts_at", "job"))
    for job in sorted(running, key=attrgetter("ends_at"), reverse=True):
        together.append(job.share)
        more = _slots_without(node, needs, together) - len(blocked)
        put(job.job, more, (job.starts_at, job.ends_at), blocked.__contains__)
        blocked.update(slots[node.name, job.job])
    waiting = sorted((use for use in others if not use.is_running), key=attrgetter("starts_at", "job"))
    for job in waiting:
        window = (job.starts_at, job.ends_at)
        busy = {slot for slot, known in enumerate(windows) if any(_overlap(window, other) for other in known)}
        put(job.job, _slots_without(node, needs, [job.share]), window, busy.__contains__)
    return [_merged(known) for known in windows], slots


def _overlap(first: Window, second: Window) -> bool:
    return first[0] < second[1] and second[0] < first[1]


def _with_end(use: NodeUse, now: float) -> NodeUse:
    if use.ends_at > now:
        return use
    ends_at = (now // OVERTIME_S + 2) * OVERTIME_S
    return NodeUse(use.job, use.share, use.is_running, use.is_ours, use.starts_at, ends_at)


def _unaccounted(node: SlurmNode, needs: SlotNeeds, use: Sequence[NodeUse], ours: int) -> int:
    """GPUs in use by jobs that we may not see. A job of ours that began between two of Slurm's answers is
    only known by its slots."""
    if needs.kind is None:
        return 0

    def count(is_ours: bool) -> int:
        return sum(
            job.share.gpus.get(needs.kind or "", 0)
            for job in use
            if job.is_running and job.is_ours is is_ours
        )

    return max(node.gpus_used.get(needs.kind, 0) - count(False) - max(count(True), ours), 0)


def _slots_without(node: SlurmNode, needs: SlotNeeds, shares: Sequence[JobShare]) -> int:
    """Count the slots that we cannot use beside these: their GPUs are taken, or too few cores or too little
    memory are left for them."""
    count = len(needs.names)
    if any(share.whole_node for share in shares):
        return count
    left = count - sum(_gpus(share, needs.kind) for share in shares)
    left = min(left, (node.cores - sum(share.cores for share in shares)) // needs.cores)
    if node.memory_bytes is not None and needs.memory_bytes:
        memory = node.memory_bytes - sum(share.memory_bytes for share in shares)
        left = min(left, memory // needs.memory_bytes)
    return min(max(count - left, 0), count)


def _gpus(share: JobShare, kind: str | None) -> int:
    """A job that waits may not say which type of GPU it wants."""
    if kind is None:
        return 0
    return share.gpus.get(kind, 0) + (share.gpus.get("", 0) if kind else 0)


def _merged(windows: Iterable[Window]) -> tuple[Window, ...]:
    merged: list[Window] = []
    for start, end in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)
