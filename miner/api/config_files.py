"""The operator's YAML files: shown, checked, saved, and the effects of an edit."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from core.domain.records import Record
from miner.api.base import Answer
from miner.api.offers import BacktestComparison

#: The largest shipped profile has 8 kB.
MAX_TEXT = 64 * 1024


class FileKind(StrEnum):
    PROFILES = "profiles"
    POLICIES = "policies"
    ALERTS = "alerts"


class ConfigFile(Answer):
    """A file that has a name."""

    kind: FileKind
    name: str
    file: str
    #: It is the operator's, not shipped.
    own: bool
    writable: bool
    in_force: bool
    #: The file in force that extends it.
    used_by: str | None
    hardware: str | None
    description: str
    #: The reason that it cannot be loaded.
    problem: str | None


class FilesInForce(Answer):
    profile: str
    policy: str
    policy_problem: str | None
    profile_problem: str | None


class ConfigFileList(Answer):
    """Every profile and policy that has a name, and what is in force."""

    files: list[ConfigFile]
    #: The operator's directory of each kind.
    directories: dict[FileKind, str]
    in_force: FilesInForce


class ConfigKey(Answer):
    """One key that a file may have."""

    #: Dotted; `*` stands for a name of the writer's choice.
    path: str
    #: The values that it takes, in words.
    value: str
    #: Empty: none.
    default: str
    description: str


class EffectiveValue(Answer):
    #: Dotted.
    path: str
    value: Any
    #: `h100x4.yaml:12`, `default`, or `set` for a setting of the daemon's.
    origin: str


class ConfigFileText(ConfigFile):
    """A file's text, the values with all that it extends and their origins, and every key that there is."""

    text: str
    #: Of the saved text; empty if the operator has no such file.
    digest: str
    #: The beginning of a new file.
    draft: str | None
    keys: list[ConfigKey]
    #: Tasks and models that the values can be shown for, and the one that they are.
    subjects: list[str]
    subject: str | None
    notes: list[str]
    effective: list[EffectiveValue]
    effective_yaml: str


class TextToCheck(Record):
    text: str = Field(max_length=MAX_TEXT)
    #: Also the edit's effects on plans or answers, which takes a second or two.
    effects: bool = True


class TextToSave(Record):
    text: str = Field(max_length=MAX_TEXT)
    #: Of the text that the editor began with; empty for a new file.
    digest: str = Field(max_length=64)


class TextProblem(Answer):
    """A problem of a text. Lines and columns count from 1, or are None if it is not in this file."""

    level: Literal["error", "warning"]
    line: int | None
    column: int | None
    key: str
    text: str


class EditedValue(Answer):
    """A value of the file itself, or None if it is not written there."""

    path: str
    before: Any
    after: Any


class RuleValueChange(Answer):
    key: str
    before: str
    after: str


class RuleChange(Answer):
    rule: str
    what: Literal["new", "off", "changed"]
    values: list[RuleValueChange]


class RuleEffects(Answer):
    """The effect of an edit of the alert rules."""

    rules: list[RuleChange]


class PlanFigures(Answer):
    feasible: bool
    reason: str | None
    gpus: str
    #: `micro × accumulation × GPUs`.
    batch: str
    memory_bytes: int
    budget_bytes: int
    seconds: float
    slack_s: float
    epochs: float
    #: What limits cost, in words.
    gave_way: list[str]


class PlanChange(Answer):
    part: str
    what: str
    before: str
    after: str


class TaskEffects(Answer):
    """The plans of a typical task before and after an edit."""

    task: str
    before: PlanFigures
    after: PlanFigures
    differences: list[PlanChange]


class PlanEffects(Answer):
    """The effect of an edit of a profile on typical tasks."""

    gpus: str
    #: The profile compared with.
    before: str
    tasks: list[TaskEffects]


class TextCheck(Answer):
    """Problems by line, the difference from what is saved, and the effects of the edit."""

    valid: bool
    problems: list[TextProblem]
    diff: str
    edited: list[EditedValue]
    effects: RuleEffects | PlanEffects | BacktestComparison | None
