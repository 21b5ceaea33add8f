"""A daemon about which everything is known that Prometheus can be told: measured GPUs and trainings."""

from __future__ import annotations

import json
from pathlib import Path

from core.config.files import config_dir
from miner.api.jobs import LiveJob
from miner.api.samples import GpuSample, HostSample
from miner.jobs.folder import AttemptFolder
from miner.jobs.progress import RunProgress
from miner.jobs.running_training import RunningTraining
from miner.observe.alerts import AlertKind
from tests.core.builders import plan
from tests.miner.http.daemon_in_process import DaemonInProcess, task


def known_sample(at: float, gpu: str) -> GpuSample:
    return GpuSample(
        at,
        gpu,
        utilization=0.97,
        memory_used=60 * 2**30,
        memory_total=80 * 2**30,
        temperature=62.0,
        power_watts=640.0,
        power_limit_watts=700.0,
        sm_clock_mhz=1755,
        max_sm_clock_mhz=1980,
        throttle=("power",),
        pcie_bytes_s=1.2e9,
        nvlink_bytes_s=3e10,
        ecc_errors=0,
        tensor=0.41,
        dram=0.55,
    )


def training_on(folder: Path, now: float, job_id: int, *gpus: str) -> RunningTraining:
    live = LiveJob(
        job_id,
        f"t{job_id}",
        "training",
        stage="train",
        attempt=1,
        gpus=gpus,
        step=40,
        steps=1000,
        loss=1.25,
        learning_rate=2e-4,
        grad_norm=0.8,
        tokens_s=12_000.0,
        samples_s=9.5,
        mfu=0.41,
        wait=0.02,
        efficiency=0.93,
        memory_bytes=61 * 2**30,
        memory_estimate_bytes=64 * 2**30,
        base_score=2.1,
        score=1.4,
        best_score=1.3,
        ends_at=now + 1800,
        deadline_at=now + 3600,
    )
    progress = RunProgress(now - 100, first_step_at=now - 60)
    return RunningTraining(live, 1, now - 100, plan(), AttemptFolder(folder), progress)


async def know_everything(running: DaemonInProcess, folder: Path) -> list[RunningTraining]:
    """Measure all GPUs and the host, and train a job on each; the list may be changed."""
    daemon, now = running.daemon, running.daemon.clock()
    gpus = [gpu.id for gpu in daemon.fleet.inventory.gpus]
    host = HostSample(now, cpu=0.2, memory_share=0.3, disk_free_bytes=10**12, disk_free_share=0.5)
    daemon.samples.add([known_sample(now, gpu) for gpu in gpus], host)
    trainings = [training_on(folder, now, number, gpu) for number, gpu in enumerate(gpus, 1)]
    daemon.trainings = lambda: trainings  # type: ignore[method-assign]
    await running.offer(task(seed=1))
    await running.start(task(seed=1))
    daemon.alerts(AlertKind.JOB_FAILED, "oom, no smaller plan")
    await daemon.store.write(lambda connection: None)
    return trainings


def dashboard_queries() -> list[str]:
    """What the Grafana dashboard asks, with its variables filled in as for all miners."""
    dashboard = json.loads((config_dir() / "grafana" / "god-miner.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [query.replace("$instance", ".+").replace("$__rate_interval", "1m") for query in queries]
