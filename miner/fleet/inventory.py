"""Scan the GPUs in the background and update the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from core.domain.hardware import GpuSet, Hardware
from miner.fleet.base import FleetNode, InventoryState, NodeGpus, group_by_node
from miner.fleet.fleet import Fleet
from miner.fleet.fleet_file import FleetTerms, FollowedFleetFile
from miner.fleet.health import GpuHealth, GpuHealthReport
from miner.fleet.sources import GpuScan, GpuSource, NoNvidiaDriver, ScanFailed, ScannedNode
from miner.observe.alerts import AlertKind, SendAlert, gpu_subject

log = logging.getLogger(__name__)

#: How long the daemon's start waits for the first scan. A driver that wakes its GPUs first takes longer.
FIRST_SCAN_SECONDS = 1.0
#: Time between two scans.
REFRESH_SECONDS = 5.0


class GpuInventory:
    def __init__(
        self,
        source: GpuSource,
        fleet: Fleet,
        health: GpuHealth,
        this_machine: Callable[[], ScannedNode],
        alert: SendAlert,
        file: FollowedFleetFile | None = None,
    ) -> None:
        """`this_machine` returns the daemon's machine without its GPUs; `file` is FLEET_FILE, if set."""
        self._source, self._fleet, self._health = source, fleet, health
        self._this_machine, self._alert, self._file = this_machine, alert, file
        self.refresh_seconds = REFRESH_SECONDS
        self._wake = asyncio.Event()
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._report: GpuHealthReport | None = None
        #: Nodes of a cluster as last scanned.
        self._scanned_nodes: dict[str, ScannedNode] = {}
        self._notes: tuple[str, ...] = ()
        #: The reason why the last scan, or a part of it, failed.
        self._problem: str | None = None
        self.source_name = ""
        self.scanned_at: float | None = None

    def file_problem(self) -> str | None:
        """Return the reason why FLEET_FILE as it is now is not in force, if it is not."""
        return str(self._file.problem) if self._file is not None and self._file.problem else None

    def terms(self) -> FleetTerms | None:
        """Return FLEET_FILE as it is in force, or None if it is not set."""
        return self._file.current.content if self._file is not None else None

    def refresh_file(self) -> None:
        """Load edits of FLEET_FILE."""
        if self._file is not None:
            self._file.refresh()

    async def start(self) -> None:
        """Begin to scan, and wait a moment for the first scan: an offer that comes now should find GPUs."""
        self._fleet.on_release(self._wake.set)
        self._task = asyncio.create_task(self._run(), name="inventory")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SCAN_SECONDS):
                await self._first.wait()

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._source.close()

    async def scan(self) -> None:
        """Scan now. A failed scan changes only the problem that the fleet shows."""
        try:
            scan = await self._source.scan()
        except ScanFailed as error:
            self._note_problem(str(error))
        else:
            self._note_scan(scan)
        self._first.set()

    async def _run(self) -> None:
        while True:
            try:
                await self.scan()
            except Exception:  # a bug here must not leave the daemon blind for good
                log.exception("scanning the GPUs failed unexpectedly; it is tried again")
                self._note_problem("scanning the GPUs failed; the daemon's log says why")
            await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.refresh_seconds):
                await self._wake.wait()
        self._wake.clear()

    def _note_problem(self, text: str) -> None:
        self._fleet.update(self._state(self._report, text))
        if self._problem is None:
            self._alert(AlertKind.INVENTORY_UNREADABLE, text)
        self._problem = text

    def _note_scan(self, scan: GpuScan) -> None:
        fleet = self._fleet
        problem, self._problem = self._problem, scan.problem
        self.source_name, self.scanned_at = scan.source, self._fleet.clock()
        self._notes = scan.notes
        self._scanned_nodes |= {node.name: node for node in scan.nodes}
        self._report = self._health.update(scan, self.scanned_at, fleet.is_in_use, fleet.released_at)
        fleet.update(self._state(self._report, None))
        if problem is not None and scan.problem is None:
            self._alert(
                AlertKind.INVENTORY_RECOVERED, f"{scan.source} can be read again: {len(scan.gpus)} GPUs"
            )
        elif problem is None and scan.problem is not None:
            self._alert(AlertKind.INVENTORY_UNREADABLE, f"only this machine is used: {scan.problem}")
        for change in self._report.changes:
            self._alert(change.kind, change.text, gpu_subject(change.gpu))

    def _state(self, report: GpuHealthReport | None, problem: str | None) -> InventoryState:
        if report is None:
            return InventoryState(problem=problem)
        scanned = {**self._scanned_nodes, "": self._this_machine()}
        return InventoryState(
            gpus=report.gpus,
            nodes=tuple(
                _fleet_node(scanned[group.node], group, report)
                for group in group_by_node(report.gpus)
                if group.node in scanned
            ),
            failed=report.failed,
            unclean=report.unclean,
            shared=report.shared,
            problem=problem,
            notes=self._notes,
        )


def _fleet_node(node: ScannedNode, group: NodeGpus, report: GpuHealthReport) -> FleetNode:
    gpus = GpuSet(kind=report.kinds[node.name], count=len(group.every))
    near_cores = tuple(gpu.cores for gpu in group.every)
    installed = Hardware.model_validate({**node.facts, "gpus": gpus, "near_cores": near_cores})
    usable = len(group.usable)
    return FleetNode(
        name=node.name,
        backend=node.backend,
        hardware=installed.model_copy(update={"gpus": gpus.take(usable)}) if usable else None,
        installed=installed,
        state=node.state,
        sees_memory=node.name in report.measured,
    )


class AutoGpuSource:
    """The driver's GPUs, or those of `fallback` on a host without a driver."""

    def __init__(self, driver: GpuSource, fallback: GpuSource) -> None:
        self._source, self._fallback = driver, fallback
        self._is_settled = False

    async def scan(self) -> GpuScan:
        try:
            scan = await self._source.scan()
        except NoNvidiaDriver:
            if self._is_settled:
                raise
            await self._source.close()
            self._source = self._fallback
            scan = await self._source.scan()
        self._is_settled = True
        return scan

    async def close(self) -> None:
        await self._source.close()
