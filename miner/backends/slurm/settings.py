"""The settings of Slurm."""

# No `annotations` from __future__: pydantic would evaluate every string of them twice, at each start.
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from core.domain import slurm
from miner.settings import values
from miner.settings.fields import Section, setting


def _slurm_options(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(slurm.check_option, value))


def _slurm_container(value: str) -> str:
    kind, _, image = value.partition(":")
    if kind not in ("apptainer", "pyxis") or not re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9_.,:@%+/#=-]*", image):
        raise ValueError(
            "must be apptainer: and the path of an image, or pyxis: and an image as pyxis has it, "
            "such as pyxis:registry.example.org#team/trainer:1"
        )
    if kind == "apptainer" and not image.startswith("/"):
        raise ValueError("must name the image of apptainer by its whole path, which all nodes share")
    return value


def _blanks(value: Any) -> Any:
    return tuple(dict.fromkeys(value.split())) if isinstance(value, str) else value


SlurmName = Annotated[
    str, values.matches(slurm.NAME, "must be a name of Slurm: letters, digits and _ . @ + -")
]
SlurmNames = Annotated[str, values.matches(slurm.NAMES, "must be names of Slurm, separated by commas")]
SlurmNodes = Annotated[
    str, values.matches(slurm.NODES, "must be nodes as Slurm writes them, such as n[1-4],big7")
]
SlurmConstraint = Annotated[
    str, values.matches(slurm.CONSTRAINT, "must be features of nodes as sbatch has them, such as h100&ib")
]
SlurmOptions = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_blanks), AfterValidator(_slurm_options)]
SlurmModule = Annotated[
    str, values.matches(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}", "must be modules' names, such as cuda/12.4")
]
SlurmModules = Annotated[tuple[SlurmModule, ...], NoDecode, BeforeValidator(values.split_list)]
SlurmContainer = Annotated[str, AfterValidator(_slurm_container)]


class SlurmSection(Section):
    title = "Slurm"

    slurm_partition: SlurmNames | None = setting(
        None, "Partition, or several with commas. Unset: the cluster's default. A profile may name others."
    )
    slurm_account: SlurmName | None = setting(None, "Account that jobs are charged to.")
    slurm_qos: SlurmName | None = setting(None, "Quality of service of jobs.")
    slurm_constraint: SlurmConstraint | None = setting(
        None, "Features that a node must have, as sbatch has them: `h100&ib`."
    )
    slurm_reservation: SlurmName | None = setting(None, "Reservation to run in.")
    slurm_options: SlurmOptions = setting(
        (), "More options for sbatch, separated by blanks, such as `--comment=mine --nice=100`."
    )
    slurm_modules: SlurmModules = setting(
        (), "Modules to load on the node before a training, such as `cuda/12.4`."
    )
    slurm_container: SlurmContainer | None = setting(
        None,
        "Container to train in: `apptainer:/shared/god-miner.sif`, or `pyxis:` and an image as pyxis has it. "
        "Unset: TRAINER_PYTHON, at the same path on each node.",
    )
    slurm_nodes: SlurmNodes | None = setting(
        None, "The nodes to use, as Slurm writes them: `n[1-4],big7`. Unset: all of the partition."
    )
    slurm_max_gpus: int | None = setting(
        None, "Most of the cluster's GPUs in use at once. Unset: no limit of ours.", ge=1, le=100_000
    )
    slurm_cpus_per_gpu: int = setting(
        16, "CPUs asked for with each GPU, at most the node's share.", ge=1, le=1024
    )
    slurm_memory_per_gpu: Annotated[ByteSize, Field(ge=10**8)] = setting(
        "64GB", "Host memory with each GPU, at most the node's share, where the plan names none."
    )
    slurm_pending_seconds: values.Seconds = setting(
        600, "A job that does not begin within this time is withdrawn, and tried again elsewhere."
    )
    slurm_bin_dir: values.AbsolutePath | None = setting(
        None, "Directory of Slurm's commands. Unset: found by PATH."
    )


SECTION = SlurmSection
