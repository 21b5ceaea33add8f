"""The validator's requests and our replies, field for field as they travel.

Their client is fixed and unforgiving, ours is tolerant: fields that a newer validator adds are let
through (the raw request is stored), integers may arrive as whole floats, but a value of the wrong type
or out of any sensible range is refused with the field named. Nothing here decides anything.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from core.tasks import DatasetKind, DatasetType, FileFormat, ImageModelType, TaskType

#: Beyond this nobody means it: a task of over a year, a model beyond 1e18 parameters, a URL of 8 KiB.
MAX_HOURS = 10_000.0
MAX_COUNT = 10**18
MAX_URL = 8192

_TASK_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,126}[A-Za-z0-9])?")
_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")


def _no_stand_in_for_a_number(value: Any) -> Any:
    """JSON has numbers; a string or a boolean in their place is a mistake worth naming."""
    if isinstance(value, str | bool):
        raise ValueError(f"a JSON number is needed here, not {value!r}")
    return value


def _task_id(value: str) -> str:
    if not _TASK_ID.fullmatch(value):
        raise ValueError("a task id is 1 to 128 letters, digits, '-' and '_', as in a UUID")
    return value


def _repo_part(value: str) -> str:
    if (
        not _REPO_PART.fullmatch(value)
        or ".." in value
        or "--" in value
        or value.endswith((".git", ".ipynb"))
    ):
        raise ValueError(
            "a repository name is 1 to 96 letters, digits, '-', '_' and '.', without '--', '..' or a slash, "
            "not ending in '.git'"
        )
    return value


def _model_id(value: str) -> str:
    parts = value.split("/")
    if len(parts) > 2 or not all(_REPO_PART.fullmatch(part) and ".." not in part for part in parts):
        raise ValueError("a model is named 'owner/name' or 'name', of letters, digits, '-', '_' and '.'")
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


TaskId = Annotated[str, AfterValidator(_task_id)]
RepoName = Annotated[str, AfterValidator(_repo_part)]
ModelId = Annotated[str, Field(min_length=1, max_length=193), AfterValidator(_model_id)]
Count = Annotated[int, BeforeValidator(_no_stand_in_for_a_number), Field(ge=0, le=MAX_COUNT)]
Hours = Annotated[
    float, BeforeValidator(_no_stand_in_for_a_number), Field(ge=0, le=MAX_HOURS, allow_inf_nan=False)
]
HttpUrl = Annotated[str, Field(min_length=1, max_length=MAX_URL), AfterValidator(_http_url)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class MinerTaskOffer(_Request):
    """`POST /task_offer/` and `/task_offer_image/`: would you take this?"""

    model: ModelId
    hours_to_complete: Hours
    task_id: TaskId
    task_type: TaskType
    #: Text: a constant 100000 since 2025-05, so no information. Image: the number of pairs.
    ds_size: Count | None = None
    model_params_count: Count | None = None


class _Start(_Request):
    model: ModelId
    task_id: TaskId
    hours_to_complete: Hours
    expected_repo_name: RepoName | None = None


class TrainRequestText(_Start):
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
            _model_id(self.dataset)
        else:
            _http_url(self.dataset)
        return self


class TrainRequestImage(_Start):
    """`POST /start_training_image/`."""

    dataset_zip: HttpUrl
    model_type: ImageModelType = ImageModelType.SDXL


class MinerTaskResponse(BaseModel):
    """The reply to an offer. Anything but a real boolean and a string counts as a no."""

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
    """One reply for both eras: the older validator ignores the last two fields."""

    github_repo: str
    commit_hash: str
    github_token: str | None = None
    requested_datasets: list[str] | None = None


class TournamentType(StrEnum):
    """What `GET /training_repo/{task_type}` may be asked for."""

    TEXT = "text"
    IMAGE = "image"
    ENVIRONMENT = "environment"
