"""A row per GPU: what it does now, for whom and until when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from miner.api.fleet import FleetGpu, FleetStatus
from miner.api.jobs import JobSummary
from miner.api.samples import GpuSample, HostSample
from miner.dashboard.job_texts import job_title
from miner.dashboard.layout import PageView
from miner.dashboard.node_rows import claim_name, claim_path, gpu_name, reserved_text
from miner.dashboard.parts import (
    KeyedRows,
    Link,
    Meter,
    Text,
    box,
    clock,
    empty,
    panel,
    percent,
    set_visible,
    size,
)

#: From here on a GPU's temperature and memory are shown as a warning: the rules' own limits.
HOT_CELSIUS, FULL_SHARE = 85.0, 0.9


class _GpuAtWork(NamedTuple):
    """A GPU with what its row shows."""

    gpu: FleetGpu
    #: The open job that runs on it.
    job: JobSummary | None
    host: HostSample | None
    now: float


class GpuRows:
    """A row per GPU: what it does now, for whom and until when."""

    def __init__(self, view: PageView) -> None:
        self._view = view
        with panel("GPUs"):
            self._rows: KeyedRows[_GpuAtWork] = KeyedRows(box("rows"), self._make)
            self._nothing = empty(
                "No GPU is known. `god-miner fleet show` says what was looked for, GPUS what may be used."
            )

    def show(self, fleet: FleetStatus, jobs: Sequence[JobSummary]) -> None:
        by_task: dict[tuple[str | None, str | None], JobSummary] = {
            (job.validator, job.task_id): job for job in jobs
        }
        items = [
            (
                gpu.id,
                _GpuAtWork(gpu, by_task.get((gpu.validator, gpu.task_id)), fleet.host, fleet.at),
            )
            for gpu in fleet.gpus
        ]
        set_visible(self._nothing, self._rows.show(items) == 0 and not fleet.nodes)

    def _make(self, _row: _GpuAtWork) -> Callable[[_GpuAtWork], None]:
        with box("gpu-row"):
            with box("stack"):
                name = Text("", "strong")
                with box("row").style("gap:2px 8px"):
                    holder = Link("", "", "cut")
                    note = Text("", "small muted")
            with box("meters") as meters:
                shown = {
                    "utilization": Meter("Utilisation"),
                    "memory": Meter("Memory", warn=FULL_SHARE),
                    "temperature": Meter("Temperature", warn=HOT_CELSIUS / 100),
                    "power": Meter("Power"),
                }
            with box("meters two") as host_meters:
                host_cpu, host_memory = Meter("Processors of the host"), Meter("Memory of the host")
            unmeasured = Text("this GPU is not measured", "small muted")

        def show(row: _GpuAtWork) -> None:
            gpu, sample = row.gpu, row.gpu.sample
            name.show(f"{gpu_name(gpu)} · {gpu.kind}")
            _show_holder(self._view, row, holder, note)
            set_visible(meters, sample is not None)
            # Without a GPU it is the host that trains.
            host = row.host if sample is None and gpu.kind == "cpu" and not gpu.node else None
            set_visible(host_meters, host is not None)
            set_visible(unmeasured, sample is None and host is None)
            unmeasured.show("GPUs of nodes are not measured here" if gpu.node else "this GPU is not measured")
            if sample is not None:
                _show_sample(sample, shown)
            if host is not None:
                host_cpu.show(host.cpu, f"host's CPU {percent(host.cpu)} busy")
                host_memory.show(host.memory_share, f"host's memory {percent(host.memory_share)} full")

        return show


def _show_holder(view: PageView, row: _GpuAtWork, holder: Link, note: Text) -> None:
    gpu, job = row.gpu, row.job
    reserved = gpu.claim if gpu.task_id is None else None
    set_visible(holder, job is not None or reserved is not None)
    if gpu.out:
        note.show(gpu.out, "bad")
        return
    if reserved is not None:
        holder.show(claim_name(reserved), view.href(claim_path(reserved)))
        note.show(reserved_text(reserved, row.now), "muted")
        return
    if job is None:
        note.show("taken by a job" if gpu.task_id else "idle", "muted")
        return
    holder.show(job_title(job), view.href(f"/jobs/{job.id}"))
    ends_at = gpu.until or (job.live.ends_at if job.live else None)
    note.show(f"until {clock(ends_at)}" if ends_at else "", "muted")


def _show_sample(sample: GpuSample, meters: Mapping[str, Meter]) -> None:
    meters["utilization"].show(sample.utilization, f"{percent(sample.utilization)} busy")
    used, total = sample.memory_used, sample.memory_total
    share = used / total if used is not None and total else None
    meters["memory"].show(share, f"{size(used)} of {size(total)}")
    celsius = sample.temperature
    meters["temperature"].show(None if celsius is None else celsius / 100, f"{celsius or 0:.0f} °C")
    watts, limit = sample.power_watts, sample.power_limit_watts
    of = f" of {limit:.0f} W" if limit else " W"
    meters["power"].show(watts / limit if watts is not None and limit else None, f"{watts or 0:.0f}{of}")
