"""Register Slurm: build its engine and its GPU source."""

from __future__ import annotations

from core.domain.hardware import parse_gpus
from miner.backends.environment import shared_environment
from miner.backends.registry import Backend, ClusterContext, EngineContext
from miner.backends.slurm.checks import LIMIT_SECONDS, check
from miner.backends.slurm.commands import job_prefix, slurm_commands
from miner.backends.slurm.engine import SlurmEngine, SlurmOptions
from miner.backends.slurm.gpu_source import ClusterScope, SlurmGpuSource
from miner.backends.slurm.runs import SlurmRuns
from miner.backends.slurm.settings import SlurmSection
from miner.settings import BackendKind, Settings
from miner.settings.values import GPU_WORDS
from miner.support.data_id import data_id


def build(settings: Settings, context: EngineContext) -> SlurmEngine:
    folder = context.folder / "slurm"
    folder.mkdir(exist_ok=True)
    options = SlurmOptions.of(settings)
    environment = None if options.container else shared_environment(settings, context, folder)
    runs = SlurmRuns(folder / "runs")
    return SlurmEngine(context, environment, slurm_commands(settings), runs, options)


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


BACKEND = Backend(
    BackendKind.SLURM,
    build,
    check,
    fix="set TRAINER_PYTHON or SLURM_CONTAINER: docs/slurm.md",
    gpu_source=gpu_source,
    check_limit_s=LIMIT_SECONDS,
)
