"""The kinds of work there are: task types and dataset types.

A validator distinguishes dataset types by which keys an object has, and sends all keys, nulls included.
So do we: `dataset_kind` looks at key presence, never at the order of a union.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

#: The most that a start request may carry. The largest seen have a handful of reward functions.
MAX_REWARD_FUNCTIONS = 64
MAX_REWARD_SOURCE = 200_000
MAX_ENVIRONMENTS = 256
#: Environments of tournaments: games that two models play against each other, and what a model does alone.
PVP_GAMES = ("gin_rummy", "liars_dice", "leduc_poker", "othello", "clobber", "goofspiel")
INTERCODE, SWE = "intercode", "swe_infinite"


@dataclass(frozen=True)
class TaskTraits:
    """The traits that set one kind of task apart from the others."""

    #: The operator's word for it, in YAML and on the command line.
    word: str
    is_text: bool = True
    #: Whether validators offer such tasks to miners; others occur in tournaments only.
    is_offered: bool = True
    #: Given answers are learned token by token: rows may be packed into one sequence.
    is_supervised: bool = False
    #: Each row has a chosen and a rejected answer, and a reference model is compared with.
    has_pairs: bool = False
    #: Completions are generated during the training, and rewarded.
    generates: bool = False
    #: How many times validators count the model's parameters when they hand out machines.
    size_factor: int = 1
    #: Assumed tokens per row: (prompt median, prompt p99, answer median, answer p99). Validators reckon with
    #: 400 tokens per row; their evaluation cuts DPO prompts at 512 and generates 256 tokens for GRPO.
    typical_tokens: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: Rows are made by the trainer itself, before the training: no file holds them, and none may be cut.
    makes_rows: bool = False


class TaskType(StrEnum):
    """A task's type, spelled as validators spell it. CONTRIBUTING's checklist says what a new one needs."""

    INSTRUCT = "InstructTextTask"
    CHAT = "ChatTask"
    DPO = "DpoTask"
    GRPO = "GrpoTask"
    IMAGE = "ImageTask"
    ENVIRONMENT = "EnvTask"

    @property
    def traits(self) -> TaskTraits:
        return TASK_TRAITS[self]

    @property
    def word(self) -> str:
        return self.traits.word

    # Cached: a plan reads these a hundred times, and through the table each takes ten times as long.
    @cached_property
    def is_text(self) -> bool:
        return self.traits.is_text

    @cached_property
    def is_supervised(self) -> bool:
        return self.traits.is_supervised

    @cached_property
    def has_pairs(self) -> bool:
        return self.traits.has_pairs

    @cached_property
    def generates(self) -> bool:
        return self.traits.generates

    @cached_property
    def makes_rows(self) -> bool:
        return self.traits.makes_rows

    @property
    def is_rl(self) -> bool:
        """Preference or reinforcement learning."""
        return self.has_pairs or self.generates


TASK_TRAITS: dict[TaskType, TaskTraits] = {
    TaskType.INSTRUCT: TaskTraits("instruct", is_supervised=True, typical_tokens=(120, 1400, 200, 1600)),
    TaskType.CHAT: TaskTraits("chat", is_supervised=True, typical_tokens=(250, 2200, 350, 2200)),
    TaskType.DPO: TaskTraits("dpo", has_pairs=True, size_factor=3, typical_tokens=(120, 1200, 220, 1200)),
    TaskType.GRPO: TaskTraits("grpo", generates=True, size_factor=2, typical_tokens=(140, 1200, 0, 0)),
    TaskType.IMAGE: TaskTraits("image", is_text=False),
    TaskType.ENVIRONMENT: TaskTraits(
        "environment",
        is_offered=False,
        is_supervised=True,
        makes_rows=True,
        typical_tokens=(1150, 1700, 45, 150),
    ),
}
#: Those that a miner is offered.
OFFERED_TASKS: tuple[TaskType, ...] = tuple(one for one in TaskType if one.traits.is_offered)
#: By the operator's word.
TASK_WORDS: dict[str, TaskType] = {task_type.word: task_type for task_type in TaskType}
_BY_EITHER_NAME = TASK_WORDS | {task_type.value.lower(): task_type for task_type in TaskType}


def task_type_named(text: str) -> TaskType | None:
    """By the operator's word or the validators', in any case."""
    return _BY_EITHER_NAME.get(text.lower())


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


class _DatasetModel(BaseModel):
    """Fields that a newer validator may add are ignored; the raw request is stored as well."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class InstructDataset(_DatasetModel):
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


class ChatDataset(_DatasetModel):
    kind: Literal[DatasetKind.CHAT] = Field(default=DatasetKind.CHAT, exclude=True)
    chat_template: str | None = "chatml"
    chat_column: str | None = "conversations"
    chat_role_field: str | None = "from"
    chat_content_field: str | None = "value"
    chat_user_reference: str | None = "user"
    chat_assistant_reference: str | None = "assistant"


class DpoDataset(_DatasetModel):
    kind: Literal[DatasetKind.DPO] = Field(default=DatasetKind.DPO, exclude=True)
    field_prompt: str | None = None
    field_system: str | None = None
    field_chosen: str | None = None
    field_rejected: str | None = None
    prompt_format: str | None = "{prompt}"
    chosen_format: str | None = "{chosen}"
    rejected_format: str | None = "{rejected}"


class RewardFunction(_DatasetModel):
    """Untrusted source code. Stored and shown, never imported by the daemon."""

    reward_func: str = Field(min_length=1, max_length=MAX_REWARD_SOURCE)
    reward_weight: float = Field(ge=0, allow_inf_nan=False)
    reward_id: str | None = None
    func_hash: str | None = None
    is_generic: bool | None = None
    is_manual: bool | None = None


class GrpoDataset(_DatasetModel):
    kind: Literal[DatasetKind.GRPO] = Field(default=DatasetKind.GRPO, exclude=True)
    field_prompt: str | None = None
    reward_functions: list[RewardFunction] = Field(min_length=1, max_length=MAX_REWARD_FUNCTIONS)
    extra_column: str | None = None


class EnvironmentDataset(_DatasetModel):
    kind: Literal[DatasetKind.ENVIRONMENT] = Field(default=DatasetKind.ENVIRONMENT, exclude=True)
    environment_names: list[str] = Field(min_length=1, max_length=MAX_ENVIRONMENTS)


#: The keys that decide, strongest first. `field_prompt` and `field_system` occur in several types and decide
#: nothing.
DISTINCTIVE_KEYS: tuple[tuple[DatasetKind, frozenset[str]], ...] = (
    (DatasetKind.GRPO, frozenset({"reward_functions"})),
    (DatasetKind.ENVIRONMENT, frozenset({"environment_names"})),
    (DatasetKind.DPO, frozenset({"field_chosen", "field_rejected"})),
    (DatasetKind.CHAT, frozenset({"chat_column", "chat_template", "chat_role_field"})),
    (DatasetKind.INSTRUCT, frozenset({"field_instruction"})),
)


def dataset_kind(keys: Mapping[str, Any]) -> DatasetKind:
    """The kind of dataset that an object describes, by key presence; `ValueError` unless exactly one fits."""
    kinds = [kind for kind, distinctive in DISTINCTIVE_KEYS if distinctive & keys.keys()]
    if len(kinds) == 1:
        return kinds[0]
    shown = json.dumps(sorted(map(str, keys))[:20])
    rule = (
        "field_instruction, chat_column, field_chosen, reward_functions or environment_names decides the type"
    )
    if not kinds:
        raise ValueError(f"dataset_type with the keys {shown} is of no known type; one of {rule}")
    raise ValueError(
        f"dataset_type with the keys {shown} fits {' and '.join(kinds)} at once; only one of {rule}"
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

#: The task type that trains a dataset kind.
TASK_TYPE_OF: dict[DatasetKind, TaskType] = {
    DatasetKind.INSTRUCT: TaskType.INSTRUCT,
    DatasetKind.CHAT: TaskType.CHAT,
    DatasetKind.DPO: TaskType.DPO,
    DatasetKind.GRPO: TaskType.GRPO,
    DatasetKind.ENVIRONMENT: TaskType.ENVIRONMENT,
}
