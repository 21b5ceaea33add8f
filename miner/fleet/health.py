"""Decide from scan to scan which GPUs may be used.

A GPU that fails, vanishes or is used by somebody else is excluded at once, and back only after it has been
fine for a while: one that comes and goes would take a job with it every time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core.domain.hardware import GpuKind
from miner.fleet.base import Gpu
from miner.fleet.sources import GpuScan, ScannedGpu
from miner.observe.alerts import AlertKind

#: If more memory than this, and than this share of it, is in use on an idle GPU, somebody else uses it.
FOREIGN_BYTES = 2**30
FOREIGN_SHARE = 0.02


class GpuChange(NamedTuple):
    """A change of a GPU's health, for the operator."""

    kind: AlertKind
    gpu: str
    text: str


@dataclass(frozen=True, slots=True)
class GpuHealthReport:
    gpus: tuple[Gpu, ...]
    #: The kind of GPU for which a node is planned: its most frequent, with the least memory of usable ones.
    kinds: dict[str, GpuKind]
    #: Faults by GPU, of GPUs on which not even a running job can continue.
    failed: dict[str, str] = field(default_factory=dict)
    #: GPUs whose last job's memory is not free yet.
    unclean: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    #: The nodes whose memory in use is known.
    measured: frozenset[str] = frozenset()
    changes: tuple[GpuChange, ...] = ()


@dataclass(slots=True)
class _TrackedGpu:
    scanned: ScannedGpu
    #: Its fault, present or recent, or None if it has been fine for long enough.
    fault: str | None = None
    #: True if a job that runs on it is lost.
    is_fatal: bool = False
    fine_since: float | None = None


class GpuHealth:
    def __init__(self, *, return_seconds: float, settle_seconds: float = 60.0) -> None:
        self._return_seconds = return_seconds
        #: Time for the processes of an ended job to go, and for running jobs to be adopted after a restart.
        self._settle_seconds = settle_seconds
        self._tracked: dict[str, _TrackedGpu] = {}
        self._first_scan_at: float | None = None

    def update(
        self, scan: GpuScan, now: float, in_use: Callable[[str], bool], released_at: Mapping[str, float]
    ) -> GpuHealthReport:
        """Judge a scan. `in_use` returns True for a GPU on which one of our jobs runs."""
        first_scan_at = self._first_scan_at = now if self._first_scan_at is None else self._first_scan_at
        changes, unclean = [], set()
        faults = self._faults(scan)
        for name in [name for name in faults if self._tracked[name].scanned.node and not in_use(name)]:
            del faults[name], self._tracked[name]  # nodes of a cluster come and go
        for name, tracked in self._tracked.items():
            # On a cluster's node the job goes on: the scheduler says when it has ended.
            fault, is_fatal = faults.get(name), name in faults and not tracked.scanned.node
            if fault is None and (foreign := _foreign_use(tracked.scanned)) and not in_use(name):
                if now - max(released_at.get(name, first_scan_at), first_scan_at) < self._settle_seconds:
                    unclean.add(name)
                else:
                    fault = foreign
            changes += self._record_fault(name, tracked, fault, is_fatal, now)
        return self._report(frozenset(unclean), tuple(changes))

    def _faults(self, scan: GpuScan) -> dict[str, str]:
        """Track the GPUs that were scanned; return the faults of those that were not."""
        seen = {gpu.id: gpu for gpu in scan.gpus}
        for name, gpu in seen.items():
            known = self._tracked.setdefault(name, _TrackedGpu(gpu))
            known.scanned = gpu
        return {
            name: f"the cluster does not list {tracked.scanned.node} any more"
            if tracked.scanned.node
            else scan.errors.get(tracked.scanned.index, "the driver does not list it any more")
            for name, tracked in self._tracked.items()
            if name not in seen
        }

    def _record_fault(
        self, name: str, tracked: _TrackedGpu, fault: str | None, is_fatal: bool, now: float
    ) -> list[GpuChange]:
        if fault is not None:
            is_news = tracked.fault is None or (is_fatal and not tracked.is_fatal)
            tracked.fault, tracked.is_fatal, tracked.fine_since = fault, is_fatal, None
            return [GpuChange(AlertKind.GPU_OUT, name, fault)] if is_news else []
        if tracked.fault is None:
            return []
        tracked.is_fatal = False
        tracked.fine_since = now if tracked.fine_since is None else tracked.fine_since
        if not 0 <= now - tracked.fine_since < self._return_seconds:
            text, tracked.fault = tracked.fault, None
            return [
                GpuChange(
                    AlertKind.GPU_BACK, name, f"fine for {self._return_seconds:g} s again (it was: {text})"
                )
            ]
        return []

    def _report(self, unclean: frozenset[str], changes: tuple[GpuChange, ...]) -> GpuHealthReport:
        main = self._main_kinds()
        by_index = sorted(self._tracked.items(), key=_node_order)
        gpus = tuple(_gpu(name, tracked, main[tracked.scanned.node]) for name, tracked in by_index)
        kinds = dict(main)
        for gpu in gpus:
            if gpu.unusable_reason is None and gpu.kind.memory_bytes < kinds[gpu.node].memory_bytes:
                kinds[gpu.node] = gpu.kind
        return GpuHealthReport(
            gpus=gpus,
            kinds=kinds,
            failed={name: tracked.fault for name, tracked in by_index if tracked.fault and tracked.is_fatal},
            unclean=unclean,
            shared=frozenset(name for name, tracked in by_index if tracked.scanned.processes),
            measured=frozenset(
                tracked.scanned.node for _, tracked in by_index if tracked.scanned.used_bytes is not None
            ),
            changes=changes,
        )

    def _main_kinds(self) -> dict[str, GpuKind]:
        """Choose the kind of GPU for which each node is planned: the most frequent, among equals the faster
        one, and of that the one with the most memory."""
        nodes: dict[str, list[GpuKind]] = {}
        for tracked in self._tracked.values():
            nodes.setdefault(tracked.scanned.node, []).append(tracked.scanned.kind)
        return {node: _main_kind(kinds) for node, kinds in nodes.items()}


def _main_kind(kinds: list[GpuKind]) -> GpuKind:
    count = Counter(kind.name for kind in kinds)
    return max(kinds, key=lambda kind: (count[kind.name], kind.bf16_flops, kind.name, kind.memory_bytes))


def _node_order(item: tuple[str, _TrackedGpu]) -> tuple[list[tuple[int, str]], int]:
    """Sort this machine first, and n2 before n10."""
    gpu = item[1].scanned
    parts = re.findall(r"\d+|\D+", gpu.node)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], gpu.index


def _foreign_use(gpu: ScannedGpu) -> str | None:
    if gpu.used_bytes is None or gpu.used_bytes <= max(FOREIGN_BYTES, FOREIGN_SHARE * gpu.total_bytes):
        return None
    return f"somebody else uses {gpu.used_bytes / 2**30:.1f} GiB of it"


def _gpu(name: str, tracked: _TrackedGpu, main: GpuKind) -> Gpu:
    gpu, reason = tracked.scanned, tracked.fault
    if reason is not None and tracked.fine_since is not None:
        reason = f"{reason}; fine again, and watched for a while"
    if reason is None and gpu.excluded is not None:
        reason = f"taken out: {gpu.excluded}"
    if reason is None and gpu.kind.name != main.name:
        reason = f"a {gpu.kind.name} among {main.name}: a machine is planned for one kind of GPU"
    return Gpu(name, gpu.index, gpu.kind, gpu.linked, reason, gpu.node, gpu.busy, gpu.cores)
