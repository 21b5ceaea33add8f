"""Measurements of GPUs and of the host, and the last hour of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from core.domain.units import MetricUnit
from miner.api.fleet import GpuSample, HostSample

#: How much is kept in memory; older measurements are in the store, rolled up.
KEPT_SECONDS = 3600.0
#: A GPU whose newest sample is older than this is not measured now.
FRESH_SECONDS = 30.0


#: Throttling that tells of a fault.


class SampledNumber(NamedTuple):
    """A number of a sample: its meaning, and its name wherever it is shown; no name where it is not."""

    #: The attribute of `GpuSample` or `HostSample`.
    name: str
    unit: MetricUnit
    text: str
    #: In rules.
    metric: str = ""
    #: In what Prometheus scrapes.
    gauge: str = ""
    #: In `GET /samples`.
    series: str = ""
    #: In the store: a column of `gpu_rollups`.
    column: str = ""


_SHARE, _COUNT, _BYTES, _RATE = (
    MetricUnit.SHARE,
    MetricUnit.COUNT,
    MetricUnit.BYTES,
    MetricUnit.BYTES_PER_SECOND,
)
_CELSIUS, _WATTS, _MHZ = MetricUnit.CELSIUS, MetricUnit.WATTS, MetricUnit.MEGAHERTZ
#: Rules, Prometheus, `GET /samples` and the store read these.
GPU_NUMBERS = (
    SampledNumber(
        "utilization",
        _SHARE,
        "Time in which a kernel ran",
        "gpu.utilization",
        "gpu_utilization_ratio",
        "utilization",
        "utilization",
    ),
    SampledNumber("memory_used", _BYTES, "Memory in use", "", "gpu_memory_used_bytes"),
    SampledNumber("memory_total", _BYTES, "Memory of the GPU", "", "gpu_memory_total_bytes"),
    SampledNumber("memory_share", _SHARE, "Memory in use", "gpu.memory", "", "memory", "memory"),
    SampledNumber(
        "temperature",
        _CELSIUS,
        "Temperature of the chip",
        "gpu.temperature",
        "gpu_temperature_celsius",
        "temperature",
        "temperature",
    ),
    SampledNumber("power_watts", _WATTS, "Power drawn", "gpu.power", "gpu_power_watts", "power", "power"),
    SampledNumber("power_limit_watts", _WATTS, "Power that it may draw", "", "gpu_power_limit_watts"),
    SampledNumber("sm_clock_mhz", _MHZ, "SM clock", "", "gpu_sm_clock_hertz", "sm_clock_mhz"),
    SampledNumber("max_sm_clock_mhz", _MHZ, "Highest SM clock", "", "gpu_sm_clock_max_hertz"),
    SampledNumber("clock_share", _SHARE, "SM clock, of the highest one", "gpu.clock", "", "", "clock"),
    SampledNumber(
        "throttled", _SHARE, "1 while anything holds the clocks down, else 0", "", "", "", "throttled"
    ),
    SampledNumber(
        "throttled_by_fault",
        _SHARE,
        "1 while heat or the hardware holds the clocks down, else 0: the mean is a share of the time",
        "gpu.throttled",
    ),
    SampledNumber(
        "ecc_errors", _COUNT, "Uncorrected memory errors since the driver was loaded", "gpu.ecc_errors"
    ),
    SampledNumber(
        "pcie_bytes_s",
        _RATE,
        "PCIe traffic, both directions",
        "",
        "gpu_pcie_bytes_per_second",
        "pcie_bytes_s",
        "pcie",
    ),
    SampledNumber(
        "nvlink_bytes_s",
        _RATE,
        "NVLink traffic, both directions",
        "",
        "gpu_nvlink_bytes_per_second",
        "nvlink_bytes_s",
        "nvlink",
    ),
    SampledNumber(
        "tensor",
        _SHARE,
        "Time in which tensor cores worked (Hopper and newer)",
        "gpu.tensor",
        "gpu_tensor_active_ratio",
        "tensor",
        "tensor",
    ),
    SampledNumber(
        "dram",
        _SHARE,
        "Memory bandwidth in use (Hopper and newer)",
        "gpu.dram",
        "gpu_dram_active_ratio",
        "dram",
        "dram",
    ),
)
HOST_NUMBERS = (
    SampledNumber("cpu", _SHARE, "All cores, busy", "host.cpu", "host_cpu_ratio", "cpu"),
    SampledNumber("memory_share", _SHARE, "Memory in use", "host.memory", "host_memory_ratio", "memory"),
    SampledNumber(
        "disk_free_bytes", _BYTES, "Free space where DATA_DIR lies", "host.disk_free", "host_disk_free_bytes"
    ),
    SampledNumber(
        "disk_free_share",
        _SHARE,
        "The same, of the whole disk",
        "host.disk_free_share",
        "host_disk_free_ratio",
    ),
)
SampleT = TypeVar("SampleT", GpuSample, HostSample)


class SampleHistory:
    """The last hour of measurements, by GPU. For one event loop."""

    def __init__(self, kept_seconds: float = KEPT_SECONDS) -> None:
        self._kept = kept_seconds
        self._gpus: dict[str, deque[GpuSample]] = {}
        self._host: deque[HostSample] = deque()

    def add(self, samples: Iterable[GpuSample], host: HostSample | None = None) -> None:
        for sample in samples:
            self._append(self._gpus.setdefault(sample.gpu, deque()), sample)
        if host is not None:
            self._append(self._host, host)
            self._forget_gone(host.at - self._kept)

    @property
    def gpus(self) -> list[str]:
        return list(self._gpus)

    def latest(self, gpu: str, since: float = 0.0) -> GpuSample | None:
        """The newest sample. `since`: an older one does not count, because the GPU may have vanished."""
        kept = self._gpus.get(gpu)
        return kept[-1] if kept and kept[-1].at >= since else None

    def since(self, gpu: str, moment: float) -> list[GpuSample]:
        return _newer(self._gpus.get(gpu, ()), moment)

    @property
    def host(self) -> HostSample | None:
        return self._host[-1] if self._host else None

    def host_since(self, moment: float) -> list[HostSample]:
        return _newer(self._host, moment)

    def _append(self, kept: deque[SampleT], sample: SampleT) -> None:
        while kept and kept[-1].at > sample.at:  # the clock was put back: they would never become old
            kept.pop()
        kept.append(sample)
        while kept[0].at < sample.at - self._kept:
            kept.popleft()

    def _forget_gone(self, before: float) -> None:
        for gpu in [gpu for gpu, kept in self._gpus.items() if kept[-1].at < before]:
            del self._gpus[gpu]


def _newer(kept: Sequence[SampleT], moment: float) -> list[SampleT]:
    newest_first = itertools.takewhile(lambda sample: sample.at >= moment, reversed(kept))
    return list(newest_first)[::-1]
