"""Find the GPUs of a cluster: its nodes, and when others use them, by what Slurm knows.

Slurm gives a job some GPUs of a node, never certain ones. So a node has as many slots as GPUs, called `0@n1`,
`1@n1`…, and only their number counts: others' jobs are put on slots that none of ours has.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core.domain.hardware import GpuKind, GpuSet, UnknownGpu, find_kind, from_nvml
from core.domain.keys import gpu_on_node
from miner.backends.registry import ClusterContext
from miner.backends.slurm.commands import QUERY_S, SlurmCommands, SlurmRefused, SlurmUnreachable
from miner.backends.slurm.gpu_use import NodeUse, SlotNeeds, SlotsOfJobs, Window, slot_windows, use_by_node
from miner.backends.slurm.nodes import (
    AllocatedJob,
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

#: The engine that runs trainings on these nodes.
ENGINE_NAME = "slurm"
#: A scan is four commands of a controller that all of the site waits for: the driver's interval is not fair.
REFRESH_S = 30.0
#: After our own jobs began or ended, at most so often.
LEAST_S = 5.0
#: A bound that moves with the clock moves in such steps: else no two scans would be equal.
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
    """What of the cluster may be used, and what a job of ours asks for with each GPU."""

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
    """What bounds jobs of ours on the cluster's nodes."""

    #: Those that may be used, by name.
    partitions: Mapping[str, SlurmPartition]
    #: Ours; None: SLURM_RESERVATION is not set.
    reservation: SlurmReservation | None
    others: Sequence[SlurmReservation]

    def of(self, node: SlurmNode) -> list[SlurmPartition]:
        return [one for name, one in self.partitions.items() if name in node.partitions]

    def windows(self, node: SlurmNode, now: float) -> list[Window]:
        """When none of the node's GPUs is ours."""
        found = [(one.starts_at, one.ends_at) for one in self.others if node.name in one.nodes]
        if self.reservation is not None:
            found += [(0.0, self.reservation.starts_at), (self.reservation.ends_at, FOREVER)]
        longest = max((one.longest_s for one in self.of(node)), default=FOREVER)
        if longest < FOREVER:
            found.append((now // STEP_S * STEP_S + longest, FOREVER))
        return [(start, end) for start, end in found if end > start]


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
                found = _gpus_of(node, scope, self._cluster.kinds())
            except UnknownGpu as error:
                notes.append(str(error))
                continue
            if found is not None:
                mine, unused = found
                scanned = self._scanned(node, mine, use.get(node.name, ()), limits, slots, now)
                gpus += scanned
                state = _state_of(node) + (f" (not used: {unused})" if unused else "")
                nodes.append(ScannedNode(node.name, ENGINE_NAME, _facts_of(node, host), state))
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
        )
        bounds = limits.windows(node, now)
        windows, put = slot_windows(
            node,
            needs,
            use,
            bounds,
            whole_node=any(one.is_exclusive for one in limits.of(node)),
            before=self._slots,
            is_in_use=self._cluster.is_in_use,
            now=now,
        )
        slots |= put
        excluded = _why_not(node, limits, bounds, now)
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
    there = {one.name: one for one in answers.partitions}
    names = scope.partitions or tuple(one.name for one in there.values() if one.is_default)
    if not names:
        raise ScanFailed("Slurm has no default partition: set SLURM_PARTITION to one of " + ", ".join(there))
    missing = [name for name in names if name not in there]
    if missing:
        raise ScanFailed(
            f"SLURM_PARTITION names {', '.join(missing)}, and Slurm has {', '.join(there) or 'none'}"
        )
    own = [one for one in answers.reservations if one.name == scope.reservation]
    if scope.reservation and not own:
        raise ScanFailed(f"SLURM_RESERVATION={scope.reservation}: Slurm has none of this name (any more)")
    others = [one for one in answers.reservations if one not in own]
    return _Limits({name: there[name] for name in names}, own[0] if own else None, others)


@dataclass(frozen=True, slots=True)
class _NodeGpus:
    #: In Slurm; None: pretended.
    type: str | None
    gpus: GpuSet


def _gpus_of(node: SlurmNode, scope: ClusterScope, kinds: Mapping[str, str]) -> tuple[_NodeGpus, str] | None:
    """The GPUs that count, and what of others it has; None: it has none. `UnknownGpu`: of no known kind."""
    if scope.pretended is not None:
        return _NodeGpus(None, scope.pretended), ""
    if not node.gpus:
        return None
    main = node.main_gpu_type
    unused = ", ".join(f"{count} {kind or 'gpu'}" for kind, count in node.gpus.items() if kind != main)
    if not node.gpus[main]:
        return None
    return _NodeGpus(main, GpuSet(kind=_kind_of(node, main, kinds), count=node.gpus[main])), unused


def _facts_of(node: SlurmNode, host: Mapping[str, Any]) -> dict[str, Any]:
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
    if not any(one.state == "UP" for one in partitions):
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
