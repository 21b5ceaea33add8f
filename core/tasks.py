"""The kinds of work there are: task types and dataset types.

A validator tells dataset types apart by which keys an object has, and sends all keys, nulls included.
So do we: `dataset_kind` looks at key presence, never at the order of a union.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: What a start request carries at most. The largest seen have a handful of reward functions.
MAX_REWARD_FUNCTIONS = 64
MAX_REWARD_SOURCE = 200_000
MAX_ENVIRONMENTS = 256


class TaskType(StrEnum):
    """A task's type, spelled as validators spell it."""

    INSTRUCT = "InstructTextTask"
    CHAT = "ChatTask"
    DPO = "DpoTask"
    GRPO = "GrpoTask"
    IMAGE = "ImageTask"

    @property
    def is_text(self) -> bool:
        return self is not TaskType.IMAGE


class ImageModelType(StrEnum):
    """The image families validators have sent: the first two in offers, all of them in tournaments."""

    SDXL = "sdxl"
    FLUX = "flux"
    Z_IMAGE = "z-image"
    QWEN_IMAGE = "qwen-image"
    IDEOGRAM4 = "ideogram4"
    KREA2 = "krea2"


class FileFormat(StrEnum):
    CSV = "csv"
    JSON = "json"
    HF = "hf"
    S3 = "s3"


class DatasetKind(StrEnum):
    INSTRUCT = "instruct"
    CHAT = "chat"
    DPO = "dpo"
    GRPO = "grpo"
    ENVIRONMENT = "environment"


class _Dataset(BaseModel):
    """Fields that a newer validator may add are let through; the raw request is stored beside the model."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InstructDataset(_Dataset):
    kind: Literal[DatasetKind.INSTRUCT] = Field(default=DatasetKind.INSTRUCT, exclude=True)
    system_prompt: str | None = ""
    system_format: str | None = "{system}"
    field_system: str | None = None
    field_instruction: str | None = None
    field_input: str | None = None
    field_output: str | None = None
    format: str | None = None
    no_input_format: str | None = None
    field: str | None = None


class ChatDataset(_Dataset):
    kind: Literal[DatasetKind.CHAT] = Field(default=DatasetKind.CHAT, exclude=True)
    chat_template: str | None = "chatml"
    chat_column: str | None = "conversations"
    chat_role_field: str | None = "from"
    chat_content_field: str | None = "value"
    chat_user_reference: str | None = "user"
    chat_assistant_reference: str | None = "assistant"


class DpoDataset(_Dataset):
    kind: Literal[DatasetKind.DPO] = Field(default=DatasetKind.DPO, exclude=True)
    field_prompt: str | None = None
    field_system: str | None = None
    field_chosen: str | None = None
    field_rejected: str | None = None
    prompt_format: str | None = "{prompt}"
    chosen_format: str | None = "{chosen}"
    rejected_format: str | None = "{rejected}"


class RewardFunction(_Dataset):
    """Reward source from outside. Stored and shown, never imported by the daemon."""

    reward_func: str = Field(min_length=1, max_length=MAX_REWARD_SOURCE)
    reward_weight: float = Field(ge=0, allow_inf_nan=False)
    reward_id: str | None = None
    func_hash: str | None = None
    is_generic: bool | None = None
    is_manual: bool | None = None


class GrpoDataset(_Dataset):
    kind: Literal[DatasetKind.GRPO] = Field(default=DatasetKind.GRPO, exclude=True)
    field_prompt: str | None = None
    reward_functions: list[RewardFunction] = Field(min_length=1, max_length=MAX_REWARD_FUNCTIONS)
    extra_column: str | None = None


class EnvironmentDataset(_Dataset):
    kind: Literal[DatasetKind.ENVIRONMENT] = Field(default=DatasetKind.ENVIRONMENT, exclude=True)
    environment_names: list[str] = Field(min_length=1, max_length=MAX_ENVIRONMENTS)


#: The keys that settle it, strongest first. `field_prompt` and `field_system` appear in several types
#: and settle nothing.
TELLING_KEYS: tuple[tuple[DatasetKind, frozenset[str]], ...] = (
    (DatasetKind.GRPO, frozenset({"reward_functions"})),
    (DatasetKind.ENVIRONMENT, frozenset({"environment_names"})),
    (DatasetKind.DPO, frozenset({"field_chosen", "field_rejected"})),
    (DatasetKind.CHAT, frozenset({"chat_column", "chat_template", "chat_role_field"})),
    (DatasetKind.INSTRUCT, frozenset({"field_instruction"})),
)


def dataset_kind(keys: Mapping[str, Any]) -> DatasetKind:
    """The kind of dataset an object describes, by key presence; `ValueError` when none or several fit."""
    found = [kind for kind, telling in TELLING_KEYS if telling & keys.keys()]
    if len(found) == 1:
        return found[0]
    shown = json.dumps(sorted(map(str, keys))[:20])
    rule = (
        "field_instruction, chat_column, field_chosen, reward_functions or environment_names tells the type"
    )
    if not found:
        raise ValueError(f"dataset_type with the keys {shown} is of no known type; one of {rule}")
    raise ValueError(
        f"dataset_type with the keys {shown} fits {' and '.join(found)} at once; only one of {rule}"
    )


def _add_kind(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {**value, "kind": dataset_kind(value)}
    return value


DatasetType = Annotated[
    Annotated[
        InstructDataset | ChatDataset | DpoDataset | GrpoDataset | EnvironmentDataset,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_add_kind),
]

#: The task type that a dataset kind trains. Environments are played in tournaments only and have none.
TASK_TYPE_OF: dict[DatasetKind, TaskType] = {
    DatasetKind.INSTRUCT: TaskType.INSTRUCT,
    DatasetKind.CHAT: TaskType.CHAT,
    DatasetKind.DPO: TaskType.DPO,
    DatasetKind.GRPO: TaskType.GRPO,
}
