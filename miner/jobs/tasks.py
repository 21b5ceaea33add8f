"""Tasks of jobs, read from the stored request, and the operator's own task files."""

from __future__ import annotations

import json
import os.path
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from core.domain.errors import ConfigError, Problem
from core.domain.evaluation import Era
from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import TASK_TYPE_OF, DatasetKind, DatasetType, FileFormat, ImageModelType, TaskType
from core.domain.wire import MAX_HOURS, ModelId, RepoName, TaskId, TrainRequestImage, TrainRequestText
from core.planning.plan import TaskSpec
from miner.api.jobs import JobLabels, Note, Tag
from miner.inputs.fetch import JobTask
from miner.jobs.folder import JobFolder
from miner.store.jobs import JobRow, StartRequest

#: Stands for the validator of tasks that the operator starts. No hotkey is spelled like this.
OPERATOR = "operator"


_URLS = ("http://", "https://")


def _resolved_path(info: ValidationInfo, path: Path) -> Path:
    """A relative path belongs to the directory of the task's file."""
    folder: Path = (info.context or {}).get("folder", Path.cwd())
    # Not `Path.expanduser` and `Path.is_file`, which raise for unknown users and names that are too long.
    return (folder / os.path.expanduser(path)).resolve()


class TaskFile(BaseModel):
    """A one-off task of the operator: a start request, or the same with files of this machine.

    `god-miner eval` reads it too, see `core.runs.run_files`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: ModelId
    hours_to_complete: Annotated[float, Field(gt=0, le=MAX_HOURS, allow_inf_nan=False)]
    task_id: TaskId = Field(default_factory=lambda: f"mine-{uuid.uuid4().hex[:12]}")
    expected_repo_name: RepoName | None = None
    #: Location of the dataset. Declared before `dataset`, whose validation needs it.
    file_format: FileFormat = FileFormat.S3
    #: A URL, a file of this machine, or with file_format "hf" a dataset of the hub.
    dataset: Annotated[str, Field(min_length=1)] | None = None
    dataset_type: DatasetType | None = None
    #: A URL or a file of this machine.
    dataset_zip: Annotated[str, Field(min_length=1)] | None = None
    model_type: ImageModelType = ImageModelType.SDXL
    #: A directory of this machine with the model, instead of the hub's.
    model_folder: Path | None = None
    #: A profile by name or path, instead of the one in force.
    profile: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    tags: Annotated[tuple[Tag, ...], Field(max_length=20)] = ()
    note: Note = ""
    #: For `god-miner eval` only; a job is trained for what offers are scored on.
    era: Era = Era.OFFERS
    kl_coefficient: Annotated[float, Field(ge=0)] | None = None

    @field_validator("model_folder")
    @classmethod
    def model_folder_is_a_folder(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            return None
        value = _resolved_path(info, value)
        if not os.path.isdir(value):
            raise ValueError(f"{value} is not a directory")
        return value

    @field_validator("dataset", "dataset_zip")
    @classmethod
    def files_are_looked_for_beside_the_task(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_hub = info.field_name == "dataset" and info.data.get("file_format") is FileFormat.HF
        if value is None or is_hub or value.startswith(_URLS):
            return value
        return str(_resolved_path(info, Path(value)))

    @model_validator(mode="after")
    def it_is_one_kind_of_task(self) -> Self:
        if (self.dataset is None) is (self.dataset_zip is None):
            raise ValueError("a text task has a `dataset`, an image task a `dataset_zip`: give one of them")
        if self.dataset is not None:
            if self.dataset_type is None:
                raise ValueError("a text task needs its `dataset_type`: the columns and what they mean")
            if self.dataset_type.kind is DatasetKind.ENVIRONMENT:
                raise ValueError("environment tasks are trained in tournaments only")
        return self

    @property
    def task_type(self) -> TaskType:
        return TASK_TYPE_OF[self.dataset_type.kind] if self.dataset_type else TaskType.IMAGE

    @property
    def data(self) -> str | Path:
        """A path for anything that is neither a URL nor a name on the hub."""
        text = self.dataset or self.dataset_zip or ""
        if text.startswith(_URLS) or (self.dataset and self.file_format is FileFormat.HF):
            return text
        return Path(text)

    def start(self, now: float) -> StartRequest:
        return StartRequest(
            task_id=self.task_id,
            task_type=self.task_type,
            model=self.model,
            hours=self.hours_to_complete,
            expected_repo_name=self.expected_repo_name,
            started_at=now,
            request=self.model_dump_json().encode(),
            tags=self.tags,
            note=self.note,
        )


def read_task_file(
    text: str | bytes, source: str, folder: Path | None = None, *, may_name_files: bool = True
) -> TaskFile:
    """Parse a task file; `ConfigError` with every problem. `folder` is where relative paths start."""
    try:
        task = TaskFile.model_validate_json(text, context={"folder": folder or Path.cwd()})
    except ValidationError as error:
        problems = [
            Problem(
                ".".join(map(str, item["loc"])) or "the file", "", item["msg"].removeprefix("Value error, ")
            )
            for item in error.errors(include_url=False)
        ]
        raise ConfigError(source, problems) from None
    profile = task.profile or ""
    if not may_name_files and ("/" in profile or profile.endswith((".yaml", ".yml"))):
        text = "a file of this machine is taken from callers on this machine only; give a profile's name"
        raise ConfigError(source, [Problem("profile", profile, text)])
    if not may_name_files and (isinstance(task.data, Path) or task.model_folder is not None):
        text = "files of this machine are taken from callers on this machine only; give a URL"
        raise ConfigError(source, [Problem("dataset", "", text)])
    if isinstance(task.data, Path) and not os.path.isfile(task.data):
        raise ConfigError(source, [Problem("dataset", str(task.data), "there is no such file")])
    return task


def checked_labels(tags: list[str], note: str) -> JobLabels:
    """Tags and a note as a job may have them, or `ConfigError`."""
    try:
        return JobLabels(tags=tags, note=note)
    except ValidationError as error:
        rule = "a tag is 1 to 40 letters, digits and . _ : -, at most 20 of a job; a note has 500 characters"
        raise ConfigError("labels", [Problem("tag", str(error.errors()[0]["input"])[:60], rule)]) from None


def job_task_of(row: JobRow, folder: JobFolder) -> JobTask:
    """Read the stored request, which was checked when it came; `StepFailed` for one of another version."""
    job_task = partial(JobTask, job_id=row.id, task_type=row.task_type, folder=folder.inputs)
    try:
        if row.validator == OPERATOR:
            own = TaskFile.model_validate_json(row.request)
            return job_task(
                model=own.model,
                data=own.data,
                file_format=own.file_format,
                dataset=own.dataset_type,
                image_type=None if own.task_type.is_text else own.model_type,
                model_folder=own.model_folder,
                profile=own.profile,
            )
        if not row.task_type.is_text:
            image = TrainRequestImage.model_validate_json(row.request)
            return job_task(
                model=image.model,
                data=image.dataset_zip,
                file_format=FileFormat.S3,
                image_type=image.model_type,
            )
        text = TrainRequestText.model_validate_json(row.request)
        return job_task(
            model=text.model,
            data=text.dataset,
            file_format=text.file_format,
            dataset=text.dataset_type,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"the stored request cannot be read: {where}: {first['msg']}"
        raise StepFailed(EndReason.BAD_DATA, reason) from None


def task_spec_of(row: JobRow, task: JobTask, now: float) -> TaskSpec:
    """The planner's task, with the hours that are left."""
    return TaskSpec(
        task_type=task.task_type,
        hours=max(row.deadline_at - now, 0.0) / 3600,
        image_type=task.image_type,
        task_id=row.task_id,
    )


def repo_name(row: JobRow) -> str:
    """The name of the newest start; a task without one is published under its own id."""
    return row.expected_repo_name or f"task-{row.task_id}"[:96]


def request_for_display(request: bytes) -> Mapping[str, Any]:
    """Return the request for display, without the signed URLs."""
    try:
        values = json.loads(request)
    except ValueError:
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if key not in ("dataset", "dataset_zip")}
