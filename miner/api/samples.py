"""Measurements of GPUs and of the host: at one moment, over the last hour, and in the store.

A number of a GPU is declared here: a field of `GpuSample` and a row of `GPU_NUMBERS`; with `series` also a
field of `GpuSeries`, with `column` one of `GpuRollup` and a column of the store.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from pydantic import computed_field

from core.domain.units import MetricUnit
from miner.api.base import Answer

#: Throttling that tells of a fault.
_FAULTS = frozenset({"heat", "hardware"})


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment. None: this GPU or driver does not report it, which is not zero."""

    at: float
    gpu: str
    #: Share of the last interval in which a kernel ran.
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    #: Degrees Celsius.
    temperature: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    #: What holds the clocks down: "heat", "power", "hardware". Empty: nothing.
    throttle: tuple[str, ...] | None = None
    #: Both directions together.
    pcie_bytes_s: float | None = None
    nvlink_bytes_s: float | None = None
    #: Uncorrected memory errors since the driver was loaded.
    ecc_errors: int | None = None
    #: Xid errors since the last sample.
    xids: tuple[int, ...] = ()
    #: Shares of the last interval: the tensor cores worked, the memory's bandwidth was used.
    tensor: float | None = None
    dram: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def memory_share(self) -> float | None:
        if self.memory_used is None or not self.memory_total:
            return None
        return self.memory_used / self.memory_total

    @property
    def clock_share(self) -> float | None:
        if self.sm_clock_mhz is None or not self.max_sm_clock_mhz:
            return None
        return self.sm_clock_mhz / self.max_sm_clock_mhz

    @property
    def throttled(self) -> float | None:
        """1 while anything holds the clocks down, else 0."""
        return None if self.throttle is None else float(bool(self.throttle))

    @property
    def throttled_by_fault(self) -> float | None:
        """The same without the power limit, which is normal at full load."""
        return None if self.throttle is None else float(not _FAULTS.isdisjoint(self.throttle))


@dataclass(frozen=True, slots=True)
class HostSample:
    """The host at one moment."""

    at: float
    #: Share of all cores.
    cpu: float | None = None
    memory_share: float | None = None
    disk_free_bytes: int | None = None
    disk_free_share: float | None = None


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
        metric="gpu.utilization",
        gauge="gpu_utilization_ratio",
        series="utilization",
        column="utilization",
    ),
    SampledNumber("memory_used", _BYTES, "Memory in use", gauge="gpu_memory_used_bytes"),
    SampledNumber("memory_total", _BYTES, "Memory of the GPU", gauge="gpu_memory_total_bytes"),
    SampledNumber(
        "memory_share", _SHARE, "Memory in use", metric="gpu.memory", series="memory", column="memory"
    ),
    SampledNumber(
        "temperature",
        _CELSIUS,
        "Temperature of the chip",
        metric="gpu.temperature",
        gauge="gpu_temperature_celsius",
        series="temperature",
        column="temperature",
    ),
    SampledNumber(
        "power_watts",
        _WATTS,
        "Power drawn",
        metric="gpu.power",
        gauge="gpu_power_watts",
        series="power",
        column="power",
    ),
    SampledNumber("power_limit_watts", _WATTS, "Power that it may draw", gauge="gpu_power_limit_watts"),
    SampledNumber("sm_clock_mhz", _MHZ, "SM clock", gauge="gpu_sm_clock_hertz", series="sm_clock_mhz"),
    SampledNumber("max_sm_clock_mhz", _MHZ, "Highest SM clock", gauge="gpu_sm_clock_max_hertz"),
    SampledNumber("clock_share", _SHARE, "SM clock, of the highest one", metric="gpu.clock", column="clock"),
    SampledNumber("throttled", _SHARE, "1 while anything holds the clocks down, else 0", column="throttled"),
    SampledNumber(
        "throttled_by_fault",
        _SHARE,
        "1 while heat or the hardware holds the clocks down, else 0: the mean is a share of the time",
        metric="gpu.throttled",
    ),
    SampledNumber(
        "ecc_errors", _COUNT, "Uncorrected memory errors since the driver was loaded", metric="gpu.ecc_errors"
    ),
    SampledNumber(
        "pcie_bytes_s",
        _RATE,
        "PCIe traffic, both directions",
        gauge="gpu_pcie_bytes_per_second",
        series="pcie_bytes_s",
        column="pcie",
    ),
    SampledNumber(
        "nvlink_bytes_s",
        _RATE,
        "NVLink traffic, both directions",
        gauge="gpu_nvlink_bytes_per_second",
        series="nvlink_bytes_s",
        column="nvlink",
    ),
    SampledNumber(
        "tensor",
        _SHARE,
        "Time in which tensor cores worked (Hopper and newer)",
        metric="gpu.tensor",
        gauge="gpu_tensor_active_ratio",
        series="tensor",
        column="tensor",
    ),
    SampledNumber(
        "dram",
        _SHARE,
        "Memory bandwidth in use (Hopper and newer)",
        metric="gpu.dram",
        gauge="gpu_dram_active_ratio",
        series="dram",
        column="dram",
    ),
)
HOST_NUMBERS = (
    SampledNumber("cpu", _SHARE, "All cores, busy", metric="host.cpu", gauge="host_cpu_ratio", series="cpu"),
    SampledNumber(
        "memory_share",
        _SHARE,
        "Memory in use",
        metric="host.memory",
        gauge="host_memory_ratio",
        series="memory",
    ),
    SampledNumber(
        "disk_free_bytes",
        _BYTES,
        "Free space where DATA_DIR lies",
        metric="host.disk_free",
        gauge="host_disk_free_bytes",
    ),
    SampledNumber(
        "disk_free_share",
        _SHARE,
        "The same, of the whole disk",
        metric="host.disk_free_share",
        gauge="host_disk_free_ratio",
    ),
)


# Over time


class GpuSeries(Answer):
    """The last hour of one GPU, thinned; columns of equal length."""

    at: list[float]
    utilization: list[float | None]
    memory: list[float | None]
    temperature: list[float | None]
    power: list[float | None]
    sm_clock_mhz: list[float | None]
    tensor: list[float | None]
    dram: list[float | None]
    pcie_bytes_s: list[float | None]
    nvlink_bytes_s: list[float | None]
    throttle: list[str] | None
    ecc_errors: int | None
    xids: list[int]
    power_limit_watts: float | None
    memory_total: int | None


class HostSeries(Answer):
    at: list[float]
    cpu: list[float | None]
    memory: list[float | None]
    disk_free_bytes: int | None
    disk_free_share: float | None


class FleetSamples(Answer):
    interval_s: float
    #: The reason that nothing is measured.
    problem: str | None
    host: HostSeries
    gpus: dict[str, GpuSeries]


@dataclass(frozen=True, slots=True)
class GpuRollup:
    """A minute or an hour of one GPU: a row of `gpu_rollups`, whose schema says what each column means."""

    period: int
    at: int
    gpu: str
    job_id: int | None = None
    watched: float = 0.0
    busy: float = 0.0
    samples: int = 0
    utilization: float | None = None
    memory: float | None = None
    temperature: float | None = None
    power: float | None = None
    clock: float | None = None
    throttled: float | None = None
    tensor: float | None = None
    dram: float | None = None
    pcie: float | None = None
    nvlink: float | None = None


#: Numbers of which a period has the highest value; of all others it has the mean.
HIGHEST = frozenset({"memory", "temperature"})
ROLLUP_COLUMNS = tuple(field.name for field in fields(GpuRollup))


class GpuHistory(Answer):
    period_s: int
    gpus: dict[str, list[GpuRollup]]
