"""The fleet that the settings ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from core.errors import ConfigError
from core.hardware import parse_gpus
from miner.fleet import fleet_file
from miner.fleet.fixed import FixedSource
from miner.fleet.health import Health
from miner.fleet.host import host_facts
from miner.fleet.inventory import AutoSource, Inventory, Told
from miner.fleet.local import LocalFleet
from miner.fleet.looks import Source
from miner.fleet.nvml import NvmlSource
from miner.fleet.schedule import Rules
from miner.settings import Settings

CPU = "cpu"


def build_fleet(settings: Settings, clock: Callable[[], float]) -> LocalFleet:
    rules = Rules(patience=settings.queue_patience_seconds, max_running=_most_jobs(settings))
    return LocalFleet(rules=rules, clock=clock)


def build_inventory(
    settings: Settings, fleet: LocalFleet, told: Told, clock: Callable[[], float]
) -> Inventory:
    """`ConfigError` when FLEET_FILE can't be used."""

    def on_problem(error: ConfigError) -> None:
        told("fleet_file_problem", f"what was read of FLEET_FILE before stays in force: {error}")

    file = settings.fleet_file and fleet_file.follow(settings.fleet_file, on_problem)

    def host() -> dict[str, object]:
        return {**host_facts(settings.data_dir), **(file.current().terms.host.facts() if file else {})}

    source = build_source(settings.gpus)
    return Inventory(
        fleet_file.FileSource(file, source) if file else source,
        fleet,
        Health(return_seconds=settings.gpu_return_seconds),
        host,
        told,
        refresh_seconds=settings.gpu_refresh_seconds,
        clock=clock,
    )


def build_source(gpus: str) -> Source:
    """As GPUS says."""
    if gpus == "nvml":
        return NvmlSource()
    if gpus == "auto":
        return AutoSource(NvmlSource(), FixedSource(parse_gpus(CPU), "no NVIDIA driver"))
    return FixedSource(parse_gpus(gpus), f"GPUS={gpus}")


def _most_jobs(settings: Settings) -> int:
    """MAX_JOBS=0 takes no new ones; those that were promised are still to be run."""
    return max(1, settings.max_jobs) if settings.max_jobs is not None else Rules().max_running


def look_once(settings: Settings) -> tuple[LocalFleet, str]:
    """What a daemon would find here, and where it looks, for a command that runs beside none."""
    fleet = build_fleet(settings, time.time)
    inventory = build_inventory(settings, fleet, lambda *_, **__: None, time.time)

    async def look() -> None:
        try:
            await inventory.look()
        finally:
            await inventory.stop()

    asyncio.run(look())
    return fleet, inventory.source_name
