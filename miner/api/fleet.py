"""The fleet: nodes, GPUs, who has them, who waits, and what they measure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import computed_field

from core.domain.keys import ReservationKind
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


class GpuWindow(Answer):
    """A time in which others use a GPU; without an end: None."""

    starts_at: float
    ends_at: float | None


class FleetClaim(Answer):
    """A task's claim on GPUs: it runs on them, has them reserved, or waits."""

    job_id: int | None
    model: str | None
    validator: str
    task_id: str
    #: "running", "reserved" or "waiting".
    stage: str
    kind: ReservationKind
    gpus: list[str]
    starts_at: float
    ends_at: float
    priority: float
    accepted: bool
    #: Place in the queue.
    queue: int | None


class FleetGpu(Answer):
    id: str
    index: int
    node: str
    #: Others use it now, and when they will.
    others: bool
    busy: list[GpuWindow]
    kind: str
    memory: str
    #: Indices of the GPUs that it has a fast link to.
    linked: list[int]
    #: The reason that it takes no jobs.
    out: str | None
    #: Memory of its last job is not freed yet.
    unclean: bool
    shared: bool
    #: The task that runs on it.
    task_id: str | None
    validator: str | None
    job_id: int | None
    until: float | None
    #: The claim that runs on it, else its next reservation.
    claim: FleetClaim | None
    sample: GpuSample | None


class NodeStatus(Answer):
    """A node of a cluster."""

    name: str
    engine: str
    kind: str
    state: str
    #: It has jobs of ours, or takes none for a reason of its own, not by a limit for all.
    is_of_interest: bool
    gpus: int
    ours: int
    others: int
    free: int
    #: When the next of others' GPUs is free again; None: none, or not in sight.
    until: float | None
    out: str | None
    cpu_cores: int | None
    memory_bytes: int | None


class FleetStatus(Answer):
    """GPUs, who has them until when, what they measure, and what waits."""

    at: float
    source: str
    looked_at: float | None
    trouble: str | None
    notes: list[str]
    nodes: list[NodeStatus]
    gpus: list[FleetGpu]
    claims: list[FleetClaim]
    host: HostSample | None = None


# Measurements over time


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


class GpuHistoryPoint(Answer):
    """A minute or an hour of one GPU; the store's schema says what each column means."""

    period: int
    at: int
    gpu: str
    job_id: int | None
    watched: float
    busy: float
    samples: int
    utilization: float | None
    memory: float | None
    temperature: float | None
    power: float | None
    clock: float | None
    throttled: float | None
    tensor: float | None
    dram: float | None
    pcie: float | None
    nvlink: float | None


class GpuHistory(Answer):
    period_s: int
    gpus: dict[str, list[GpuHistoryPoint]]
