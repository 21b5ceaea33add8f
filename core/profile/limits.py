"""Limits that a training never exceeds, its container and cluster, and the factors on its targets."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from core.domain import slurm
from core.domain.records import Record
from core.domain.units import WrittenBytes, WrittenSeconds
from core.profile.declare import AXOLOTL, RENAMED, Called, Effect


class ProfileLimits(Record):
    """Limits that are never exceeded."""

    gpu_memory: Annotated[
        WrittenBytes | None,
        Called(guides=("max_memory_MB", "max_memory")),
        Effect(RENAMED, AXOLOTL).because(
            "kept as the planner's budget; Axolotl drops max_memory_MB, and its max_memory places layers "
            "wrongly when several GPUs train"
        ),
    ] = Field(default=None, description="Most memory per GPU.")
    gpu_memory_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="The same as a share; the lower of the two applies.",
    )
    min_gpus: int = Field(default=1, ge=1, le=64, description="Fewest GPUs per job.")
    max_gpus: int = Field(default=64, ge=1, le=64, description="Most GPUs per job.")
    max_jobs: int | None = Field(
        default=None, ge=1, description="Most jobs at once, over all lanes. Unset: one per GPU set."
    )
    reserve: WrittenSeconds = Field(
        default=600.0, description="Time kept free between publishing and the deadline."
    )
    reserve_share: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="The same as a share of the hours; the larger applies.",
    )
    eval_share: float = Field(default=0.1, gt=0, le=1, description="Most training time for evaluations.")
    min_epochs: float = Field(default=0.25, ge=0, description="Refuse trainings of fewer passes.")
    max_epochs: float = Field(default=4.0, gt=0, description="Most passes, if `num_epochs` is unset.")
    few_rows_power: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Text: below 10,000 rows `max_epochs` is multiplied by (10,000 / rows) ^ this.",
    )
    max_steps: int | None = Field(default=None, ge=1, description="Most optimizer steps.")
    max_lora_r: int = Field(default=2048, ge=1, description="Largest LoRA rank after scaling.")
    min_lora_r: int = Field(default=8, ge=1, description="Lowest rank that the planner may choose.")
    max_sequence_len: int = Field(default=8192, ge=16, description="Longest sequence.")
    min_sequence_len: int = Field(default=512, ge=16, description="Shortest that the planner may choose.")
    max_micro_batch: int = Field(default=256, ge=1, description="Largest micro batch.")
    max_alpha_lr: float | None = Field(
        default=None,
        gt=0,
        description="LoRA: most lora_alpha × learning_rate. Unset: no limit.",
    )
    checkpoint_disk: WrittenBytes | None = Field(default=None, description="Most disk for checkpoints.")


class ContainerTargets(Record):
    """The container around a job."""

    memory: WrittenBytes | None = Field(
        default=None, description="Host memory. Unset: in proportion to the GPUs."
    )
    shm: Annotated[WrittenBytes | None, Called(guides="shm_size")] = Field(
        default=None, description="Shared memory (/dev/shm), at most the GPUs' share. Unset: 16GB per GPU."
    )
    cpus: Annotated[
        str | None,
        Effect(RENAMED).because(
            "the cores of this range that the host has are divided among its GPUs, if there are enough; "
            "a cluster binds its tasks itself"
        ),
    ] = Field(
        default=None,
        pattern=r"^\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*$",
        description="Cores that the host's jobs divide by their GPUs, as docker's cpuset. Unset: all.",
        examples=["0-63", "0-15,32-47"],
    )


class SlurmTargets(Record):
    """A training's place on a Slurm cluster, instead of what the settings say."""

    partition: str | None = Field(
        default=None, pattern=f"^{slurm.NAMES}$", description="Partition; several with commas."
    )
    account: str | None = Field(default=None, pattern=f"^{slurm.NAME}$", description="Account to charge.")
    qos: str | None = Field(default=None, pattern=f"^{slurm.NAME}$", description="Quality of service.")
    constraint: str | None = Field(
        default=None, pattern=f"^{slurm.CONSTRAINT}$", description="Features that its nodes must have."
    )
    reservation: str | None = Field(
        default=None, pattern=f"^{slurm.NAME}$", description="Reservation to run in."
    )
    options: list[Annotated[str, AfterValidator(slurm.check_option)]] | None = Field(
        default=None, description="More options for sbatch.", examples=[["--nice=100"]]
    )

    def by_name(self) -> dict[str, str]:
        """Return what is set; options in one text."""
        values = {name: value for name, value in self.model_dump().items() if value is not None}
        return {
            name: " ".join(value) if isinstance(value, list) else str(value) for name, value in values.items()
        }


ScaleFactor = Annotated[float, Field(gt=0, le=100)]


class TargetScale(Record):
    """Factors on targets; those of all matching sections multiply. A rank of a multiple of 8 stays one."""

    lora_r: ScaleFactor = Field(default=1.0, description="Factor on lora_r.")
    lora_alpha: ScaleFactor = Field(default=1.0, description="Factor on lora_alpha.")
    micro_batch_size: ScaleFactor = Field(default=1.0, description="Factor on micro_batch_size.")
    effective_batch_size: ScaleFactor = Field(default=1.0, description="Factor on effective_batch_size.")
    learning_rate: ScaleFactor = Field(default=1.0, description="Factor on learning_rate.")
    text_encoder_lr: ScaleFactor = Field(default=1.0, description="Factor on text_encoder_lr.")
    num_epochs: ScaleFactor = Field(default=1.0, description="Factor on num_epochs.")
    max_steps: ScaleFactor = Field(default=1.0, description="Factor on max_steps.")
    weight_decay: ScaleFactor = Field(default=1.0, description="Factor on weight_decay.")
    warmup_steps: ScaleFactor = Field(default=1.0, description="Factor on warmup_steps.")
