"""The validator's requests and our replies, field for field as they travel.

Their client is fixed and unforgiving, ours is tolerant: fields that a newer validator adds are ignored
(the raw request is stored), integers may arrive as whole floats, but a value of the wrong type or out of
any sensible range is rejected with the field named. Nothing here decides anything.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from core.domain.tasks import (
    OFFERED_TASKS,
    DatasetKind,
    DatasetType,
    FileFormat,
    ImageModelType,
    TaskType,
)

#: Nobody means more: a task of over a year, a model of over 1e18 parameters, a URL of over 8 KiB.
MAX_HOURS = 10_000.0
MAX_COUNT = 10**18
MAX_URL = 8192

#: A part of a repository's name: no '..' and nothing else that could leave a directory.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.[A-Za-z0-9_-])*"
_TASK_ID = r"^[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?$"
_MODEL_ID = rf"^{_PART}(?:/{_PART})?$"


def _repo_name(value: str) -> str:
    if "--" in value or value.endswith((".git", ".ipynb")):
        raise ValueError("a repository name holds no '--' and does not end in '.git' or '.ipynb'")
    return value


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        host, _port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"an http(s) URL with a host is needed, not one of scheme {parts.scheme!r}")
    if any(ord(letter) <= 32 or ord(letter) == 127 for letter in value):
        raise ValueError("a URL holds no blanks or control characters")
    return value


# Patterns and strict numbers, not functions: offers are then parsed in Rust, in a third of the time. Strict
# means that a string or a boolean is not a number; a whole number is still a number of hours.
TaskId = Annotated[str, Field(max_length=128, pattern=_TASK_ID)]
RepoName = Annotated[str, Field(max_length=96, pattern=f"^{_PART}$"), AfterValidator(_repo_name)]
ModelId = Annotated[str, Field(max_length=193, pattern=_MODEL_ID)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
Hours = Annotated[float, Field(strict=True, ge=0, le=MAX_HOURS, allow_inf_nan=False)]
HttpUrl = Annotated[str, Field(min_length=1, max_length=MAX_URL), AfterValidator(_http_url)]


class _RequestModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class MinerTaskOffer(_RequestModel):
    """`POST /task_offer/` and `/task_offer_image/`: would you take this?"""

    model: ModelId
    hours_to_complete: Hours
    task_id: TaskId
    task_type: TaskType
    #: Text: a constant 100000 since 2025-05, so no information. Image: the number of pairs.
    ds_size: Count | None = None
    model_params_count: Count | None = None

    @field_validator("task_type")
    @classmethod
    def tournament_tasks_are_not_offered(cls, value: TaskType) -> TaskType:
        if not value.traits.is_offered:
            raise ValueError(f"{value} occurs in tournaments only; offered are {', '.join(OFFERED_TASKS)}")
        return value


class _StartRequest(_RequestModel):
    model: ModelId
    task_id: TaskId
    hours_to_complete: Hours
    expected_repo_name: RepoName | None = None


class TrainRequestText(_StartRequest):
    """`POST /start_training/` and, with a GRPO dataset, `/start_training_grpo/`."""

    #: A presigned URL, or with file_format "hf" a dataset repository.
    dataset: Annotated[str, Field(min_length=1, max_length=MAX_URL)]
    dataset_type: DatasetType
    file_format: FileFormat

    @field_validator("dataset_type")
    @classmethod
    def environments_are_not_trained_here(cls, value: DatasetType) -> DatasetType:
        if value.kind is DatasetKind.ENVIRONMENT:
            raise ValueError(
                "environment tasks are trained in tournaments, by the trainer, not by a start request"
            )
        return value

    @model_validator(mode="after")
    def dataset_is_where_its_format_says(self) -> TrainRequestText:
        if self.file_format is FileFormat.HF:
            if not re.fullmatch(_MODEL_ID, self.dataset):
                raise ValueError("with file_format 'hf' the dataset is named 'owner/name' or 'name'")
        else:
            _http_url(self.dataset)
        return self


class TrainRequestImage(_StartRequest):
    """`POST /start_training_image/`."""

    dataset_zip: HttpUrl
    model_type: ImageModelType = ImageModelType.SDXL


class MinerTaskResponse(BaseModel):
    """The reply to an offer. Anything but a real boolean and a string counts as a refusal."""

    message: str
    accepted: bool


class TrainResponse(BaseModel):
    message: str
    task_id: str


class MinerSubmission(BaseModel):
    """`repo` is `owner/expected_repo_name`; a null hash skips the verification and is always safe."""

    repo: str
    model_hash: str | None = None


class TrainingRepoResponse(BaseModel):
    """One reply for both eras: older validators ignore the last two fields."""

    github_repo: str
    commit_hash: str
    github_token: str | None = None
    requested_datasets: list[str] | None = None


class TournamentType(StrEnum):
    """The task types of `GET /training_repo/{task_type}`."""

    TEXT = "text"
    IMAGE = "image"
    ENVIRONMENT = "environment"
