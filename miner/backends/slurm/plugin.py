"""Register Slurm: build the backend, its GPU source, and a job for a run of the operator's own."""

from __future__ import annotations

import sys
from pathlib import Path

from core.domain.hardware import parse_gpus
from miner.backends.environment import shared_environment, training_interpreter
from miner.backends.registry import BackendContext, BackendPlugin, ClusterContext
from miner.backends.slurm.backend import SLACK_S, SlurmBackend, SlurmOptions
from miner.backends.slurm.checks import LIMIT_SECONDS, check
from miner.backends.slurm.commands import job_prefix, slurm_commands
from miner.backends.slurm.gpu_source import ClusterScope, SlurmGpuSource
from miner.backends.slurm.job_script import JobRequest, batch_file
from miner.backends.slurm.runs import SlurmRuns
from miner.backends.slurm.settings import SlurmSection
from miner.settings import BackendKind, Settings
from miner.settings.values import GPU_WORDS
from miner.support.data_id import data_id


def build(settings: Settings, context: BackendContext) -> SlurmBackend:
    folder = context.folder / "slurm"
    folder.mkdir(exist_ok=True)
    options = SlurmOptions.of(settings)
    environment = None if options.container else shared_environment(settings, context, folder)
    runs = SlurmRuns(folder / "runs")
    return SlurmBackend(context, environment, slurm_commands(settings), runs, options)


def gpu_source(settings: Settings, cluster: ClusterContext) -> SlurmGpuSource:
    """Find the nodes that Slurm and the settings leave to us."""
    own = settings.section(SlurmSection)
    pretended = None if settings.gpus in GPU_WORDS else parse_gpus(settings.gpus)
    scope = ClusterScope(
        partitions=tuple(own.slurm_partition.split(",")) if own.slurm_partition else (),
        nodes=own.slurm_nodes or "",
        constraint=own.slurm_constraint or "",
        reservation=own.slurm_reservation or "",
        max_gpus=own.slurm_max_gpus,
        cpus_per_gpu=own.slurm_cpus_per_gpu,
        memory_per_gpu=own.slurm_memory_per_gpu,
        pretended=pretended if pretended and pretended.is_cpu else None,
    )
    own_jobs = job_prefix(data_id(settings.data_dir))
    return SlurmGpuSource(scope, slurm_commands(settings), own_jobs, cluster)


def own_job(settings: Settings, folder: Path, gpus: int, hours: float) -> str:
    """Write a file for `sbatch` that does `train native` on this run's folder, without a daemon."""
    options = SlurmOptions.of(settings)
    job = JobRequest(
        name=f"god-miner-{folder.name}",
        run_dir=folder,
        nodes=(),
        node_count=1,
        gpus_per_node=gpus,
        cpus=options.cpus_per_gpu * max(gpus, 1),
        memory_bytes=options.memory_per_gpu * max(gpus, 1),
        limit_s=hours * 3600 + SLACK_S,
        grace_s=options.grace_s,
        placement=options.placement,
        options=options.options,
    )
    command = (sys.executable, "-m", "miner", "train", "native", str(folder))
    python = {"TRAINER_PYTHON": str(training_interpreter(settings).path)}
    return batch_file(job, command, python, options.modules)


PLUGIN = BackendPlugin(
    BackendKind.SLURM,
    build,
    check,
    fix="set TRAINER_PYTHON or SLURM_CONTAINER: docs/slurm.md",
    gpu_source=gpu_source,
    check_limit_s=LIMIT_SECONDS,
)
