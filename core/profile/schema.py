"""A profile file, its sections, and what it resolves to for one task and model."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from core.config.files import ConfigFileModel
from core.config.yaml_lines import ValueOrigin
from core.data.facts import TYPICAL_PICTURES
from core.domain.records import Record
from core.domain.selectors import Band, OneOrMany, Pictures, TaskWord
from core.domain.tasks import ImageModelType
from core.models.facts import Family
from core.profile.declare import field_names
from core.profile.limits import ContainerTargets, ProfileLimits, SlurmTargets, TargetScale
from core.profile.targets import Targets

#: By system: its name for a field of a profile → the field.
FIELD_NAMES = field_names(Targets, ProfileLimits, ContainerTargets)
#: Targets of earlier versions: their measurements are in benchmarks/techniques.md.
REMOVED_FIELDS = frozenset(
    {
        "soup_members",
        "last_stretch_rate",
        "duplicate_weight",
        "mix_datasets",
        "prompt_loss_share",
        "neftune_alpha",
        "lora_experts_r",
        "adapter_fp32",
        "activation_offload",
        "dpo_precompute_reference",
        "adam_epsilon",
        "fp32_master",
        "by_pictures",
        "checkpoint_choice",
    }
)


class SectionSelector(Record):
    """The tasks that a section is for: all conditions must hold, and without any it always applies."""

    task: Annotated[list[TaskWord], OneOrMany()] | None = Field(default=None, description="Task types.")
    image: Annotated[list[ImageModelType], OneOrMany()] | None = Field(
        default=None, description="Image model types."
    )
    size: Band | None = Field(default=None, description="Model size.")
    pictures: Pictures | None = Field(
        default=None,
        description=f"Number of training pictures. Not known, as in offers: {TYPICAL_PICTURES} are assumed. "
        "No text task matches.",
    )
    family: Annotated[list[Family], OneOrMany()] | None = Field(default=None, description="Model families.")

    @model_validator(mode="before")
    @classmethod
    def hours_decide_nothing(cls, value: Any) -> Any:
        if isinstance(value, dict) and "hours" in value:
            raise ValueError("sections cannot ask for hours: ask for the pictures, like pictures: '<28'")
        return value


EngineConfig = dict[str, JsonValue]


def _env_value(value: Any) -> Any:
    """`NCCL_NTHREADS: 8` is fine; YAML reads `on` and `no` as True and False."""
    if isinstance(value, bool):
        raise ValueError("quote it: YAML reads this word as a boolean, the program reads the text")
    return str(value) if isinstance(value, int | float) else value


Env = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    Annotated[str, BeforeValidator(_env_value), Field(max_length=4096)],
]


class EngineConfigs(Record):
    """Keys passed to an engine unchanged; checked against its real schema like all others."""

    model_config = ConfigDict(serialize_by_alias=True)

    axolotl: EngineConfig = Field(default_factory=dict, description="Into Axolotl's YAML.")
    kohya: EngineConfig = Field(default_factory=dict, description="Into kohya's TOML.")
    ai_toolkit: EngineConfig = Field(
        default_factory=dict, alias="ai-toolkit", description="Into ai-toolkit's YAML, by dotted path."
    )
    native: EngineConfig = Field(default_factory=dict, description="Into the native trainer's settings.")
    pictures: EngineConfig = Field(
        default_factory=dict, description="Over the family's recipe in the picture trainer: rank, rate, …"
    )


class ProfileSection(Record):
    """Settings for some tasks, sizes or families, laid over the general ones in the order written."""

    when: SectionSelector = Field(default=SectionSelector(), description="What the section is for.")
    targets: Targets = Field(default=Targets(), description="Targets that differ.")
    scale: TargetScale = Field(default=TargetScale(), description="Factors on targets.")
    limits: ProfileLimits = Field(default=ProfileLimits(), description="Limits that differ.")
    env: Env = Field(default_factory=dict, description="Environment variables to add.")
    engine_config: EngineConfigs = Field(default=EngineConfigs(), description="Raw engine keys to add.")
    slurm: SlurmTargets = Field(default=SlurmTargets(), description="Where such trainings run on a cluster.")


class Profile(ConfigFileModel):
    """One profile file."""

    description: str = Field(default="", description="One line for `profile list`.")
    extends: str | None = Field(
        default=None, description="Name or path of the profile that this one changes."
    )
    hardware: str | None = Field(
        default=None,
        description="Made for, like 4xH100; default of `plan` and `profile check`.",
    )
    notes: list[str] = Field(
        default_factory=list,
        description="Lines for `profile explain`.",
    )
    targets: Targets = Field(default=Targets(), description="What you want, for every task.")
    limits: ProfileLimits = Field(default=ProfileLimits(), description="What is never exceeded.")
    container: ContainerTargets = Field(default=ContainerTargets(), description="The container around a job.")
    slurm: SlurmTargets = Field(default=SlurmTargets(), description="Where trainings run on a cluster.")
    env: Env = Field(default_factory=dict, description="Environment variables of the training.")
    engine_config: EngineConfigs = Field(default=EngineConfigs(), description="Raw engine keys.")
    sections: dict[str, ProfileSection] = Field(
        default_factory=dict,
        description="Differences by task, size or family.",
    )


class ResolvedProfile(Record):
    """A profile for one task and model: flat, every value with its origin. The planner's input."""

    name: str
    digest: str
    hardware: str | None
    targets: Targets
    limits: ProfileLimits
    container: ContainerTargets
    env: dict[str, str]
    engine_config: EngineConfigs
    #: The sections that matched, in order.
    sections: tuple[str, ...]
    #: By dotted path without "sections": "targets.lora_r", "limits.gpu_memory", "env.NCCL_NTHREADS".
    origins: dict[str, ValueOrigin]
    #: Targets changed by `scale`: the value before, by name.
    before_scale: dict[str, float]
    slurm: SlurmTargets = SlurmTargets()

    def for_tournament(self, reserve_s: float) -> Self:
        """A tournament's task cannot be refused, and nothing is published: the reserve is training time."""
        free = {"reserve": reserve_s, "reserve_share": 0.0, "min_epochs": 0.0}
        return self.model_copy(update={"limits": self.limits.model_copy(update=free)})

    def origin(self, path: str) -> ValueOrigin:
        return self.origins.get(path, ValueOrigin(file="default"))

    def is_set(self, path: str) -> bool:
        """Return whether an operator wrote it, in this profile or one it extends; else it is a default."""
        return path in self.origins
