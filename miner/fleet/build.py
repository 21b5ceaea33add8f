"""Build the fleet and the inventory that the settings ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from core.domain.errors import ConfigError
from core.domain.hardware import parse_gpus
from miner.fleet import fleet_file
from miner.fleet.fleet import Fleet
from miner.fleet.health import GpuHealth
from miner.fleet.inventory import AutoGpuSource, FleetEventListener, GpuInventory
from miner.fleet.nvml import NvmlSource
from miner.fleet.schedule import QueueRules
from miner.fleet.sources import FixedGpuSource, GpuSource, host_facts
from miner.observe.alerts import AlertKind
from miner.settings import Settings

CPU = "cpu"


def build_fleet(settings: Settings, clock: Callable[[], float]) -> Fleet:
    rules = QueueRules(patience=settings.queue_patience_seconds, max_running=_max_running_jobs(settings))
    return Fleet(rules=rules, clock=clock)


def build_inventory(
    settings: Settings, fleet: Fleet, on_event: FleetEventListener, clock: Callable[[], float]
) -> GpuInventory:
    """`ConfigError` when FLEET_FILE cannot be used."""

    def on_problem(error: ConfigError) -> None:
        on_event(AlertKind.FLEET_FILE_PROBLEM, f"what was read of FLEET_FILE before stays in force: {error}")

    file = settings.fleet_file and fleet_file.follow_fleet_file(settings.fleet_file, on_problem)

    def host() -> dict[str, object]:
        return {**host_facts(settings.data_dir), **(file.current().content.host.facts() if file else {})}

    source = build_gpu_source(settings.gpus)
    return GpuInventory(
        fleet_file.FleetFileSource(file, source) if file else source,
        fleet,
        GpuHealth(return_seconds=settings.gpu_return_seconds),
        host,
        on_event,
        refresh_seconds=settings.gpu_refresh_seconds,
        clock=clock,
    )


def build_gpu_source(gpus: str) -> GpuSource:
    """Where GPUS says that the GPUs are found. An engine that runs elsewhere (a cluster) brings a source of
    its own: it is chosen here."""
    if gpus == "nvml":
        return NvmlSource()
    if gpus == "auto":
        return AutoGpuSource(NvmlSource(), FixedGpuSource(parse_gpus(CPU), "no NVIDIA driver"))
    return FixedGpuSource(parse_gpus(gpus), f"GPUS={gpus}")


def _max_running_jobs(settings: Settings) -> int:
    """MAX_JOBS=0 takes no new ones; those that were accepted still have to run."""
    return max(1, settings.max_jobs) if settings.max_jobs is not None else QueueRules().max_running


def scan_once(settings: Settings) -> tuple[Fleet, str]:
    """The fleet that a daemon would find here, and the source, for a command without a running daemon."""
    fleet = build_fleet(settings, time.time)
    inventory = build_inventory(settings, fleet, lambda *_, **__: None, time.time)

    async def scan_and_stop() -> None:
        try:
            await inventory.scan()
        finally:
            await inventory.stop()

    asyncio.run(scan_and_stop())
    return fleet, inventory.source_name
