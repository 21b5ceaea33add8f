"""Build the fleet and the inventory that the settings ask for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from core.domain.errors import ConfigError
from core.domain.hardware import parse_gpus
from miner.api.samples import GpuSample
from miner.backends.registry import ClusterContext, plugin_of
from miner.fleet import fleet_file
from miner.fleet.fleet import Fleet
from miner.fleet.health import GpuHealth
from miner.fleet.inventory import AutoGpuSource, GpuInventory
from miner.fleet.nvml import NvmlSource
from miner.fleet.sampler import GpuSampler, HostMeter, SampleHistory, samples_of_fleet
from miner.fleet.schedule import QueueRules
from miner.fleet.sources import (
    FixedGpuSource,
    GpuSource,
    JoinedGpuSource,
    ScanFailed,
    ScannedNode,
    host_facts,
)
from miner.observe.alerts import AlertKind, SendAlert
from miner.settings import Settings
from miner.store.store import Store

CPU = "cpu"
#: Interval at which GPUs and host are measured; 0 for never.
SAMPLE_SECONDS = 5.0
#: A GPU that failed or was occupied must be fine for this long before it is used again.
RETURN_SECONDS = 300.0


def build_fleet(settings: Settings, clock: Callable[[], float]) -> Fleet:
    rules = QueueRules(max_running=_max_running_jobs(settings))
    return Fleet(rules=rules, clock=clock)


def build_inventory(
    settings: Settings,
    fleet: Fleet,
    nvml: NvmlSource,
    alert: SendAlert,
    clock: Callable[[], float],
) -> GpuInventory:
    """`ConfigError` when FLEET_FILE cannot be used."""

    def on_problem(error: ConfigError) -> None:
        alert(AlertKind.FLEET_FILE_PROBLEM, f"what was read of FLEET_FILE before stays in force: {error}")

    path = settings.fleet_file
    file = fleet_file.follow_fleet_file(path, on_problem) if path else None

    def host() -> dict[str, object]:
        return {**host_facts(settings.data_dir), **(file.current.content.host.facts() if file else {})}

    def this_machine() -> ScannedNode:
        return ScannedNode("", settings.local_backend or "", host())

    def kinds() -> Mapping[str, str]:
        return file.current.content.kinds if file else {}

    def corrected(source: GpuSource, *, is_local: bool) -> GpuSource:
        return fleet_file.FleetFileSource(file, source, is_local=is_local) if file else source

    sources: list[GpuSource] = []
    if settings.local_backend is not None:
        sources.append(corrected(build_gpu_source(settings.gpus, nvml), is_local=True))
    context = ClusterContext(kinds, host, fleet.is_in_use, clock)
    for plugin in (plugin_of(kind) for kind in settings.backends if kind.is_cluster):
        if plugin.gpu_source is not None:
            sources.append(corrected(plugin.gpu_source(settings, context), is_local=False))
    return GpuInventory(
        JoinedGpuSource(*sources) if len(sources) > 1 else sources[0],
        fleet,
        GpuHealth(return_seconds=RETURN_SECONDS),
        this_machine,
        alert,
        file,
    )


def build_sampler(
    settings: Settings,
    fleet: Fleet,
    nvml: NvmlSource,
    history: SampleHistory,
    store: Store,
    clock: Callable[[], float],
) -> GpuSampler:
    """NVML measures also where it is not asked which GPUs there are (`GPUS=4xH100`)."""
    host = HostMeter(settings.data_dir)
    return GpuSampler(nvml, fleet, history, store, host, interval=SAMPLE_SECONDS)


def build_gpu_source(gpus: str, nvml: NvmlSource) -> GpuSource:
    """The source of this machine's GPUs that GPUS names."""
    if gpus == "nvml":
        return nvml
    if gpus == "auto":
        return AutoGpuSource(nvml, FixedGpuSource(parse_gpus(CPU), "no NVIDIA driver"))
    return FixedGpuSource(parse_gpus(gpus), f"GPUS={gpus}")


def _max_running_jobs(settings: Settings) -> int:
    """MAX_JOBS=0 takes no new ones; those that were accepted still have to run."""
    return max(1, settings.max_jobs) if settings.max_jobs is not None else QueueRules().max_running


def scan_once(settings: Settings) -> tuple[Fleet, str]:
    """The fleet that a daemon would find here, and the source, for a command without a running daemon."""
    fleet, source, _ = asyncio.run(_scan_once(settings, measure=False))
    return fleet, source


def scan_and_sample_once(settings: Settings) -> tuple[Fleet, str, list[GpuSample]]:
    """Like `scan_once`, with what each GPU measures now."""
    return asyncio.run(_scan_once(settings, measure=True))


async def _scan_once(settings: Settings, *, measure: bool) -> tuple[Fleet, str, list[GpuSample]]:
    fleet, nvml = build_fleet(settings, time.time), NvmlSource()
    inventory = build_inventory(settings, fleet, nvml, lambda *_, **__: None, time.time)
    samples: list[GpuSample] = []
    try:
        await inventory.scan()
        if measure:
            with contextlib.suppress(ScanFailed):
                samples = samples_of_fleet(fleet.inventory.gpus, await nvml.sample(), time.time())
    finally:
        await inventory.stop()
        await nvml.close()
    return fleet, inventory.source_name, samples
