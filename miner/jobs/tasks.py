"""What a job was asked to do, read from the request as it was received."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
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

from core.errors import ConfigError, Problem
from core.evaluation import Era
from core.plan_parts import TaskSpec
from core.tasks import TASK_TYPE_OF, DatasetKind, DatasetType, FileFormat, ImageModelType, TaskType
from core.wire import (
    MAX_HOURS,
    ModelId,
    RepoName,
    TaskId,
    TrainRequestImage,
    TrainRequestText,
)
from miner.jobs.folder import JobFolder
from miner.jobs.ports import StepFailed, Wanted
from miner.jobs.states import EndReason
from miner.store.jobs import Start
from miner.store.work import JobRow

#: Who starts the tasks that no validator sent. No hotkey is spelled like this.
OPERATOR = "operator"


_URLS = ("http://", "https://")


def _from(given: ValidationInfo, path: Path) -> Path:
    """A path as the task's file means it."""
    folder: Path = (given.context or {}).get("folder", Path.cwd())
    return (folder / path.expanduser()).absolute()


class TaskFile(BaseModel):
    """A one-off task of the operator's: a start request, or the same with files of this machine. `god-miner
    eval` reads it too, see `core.eval_task`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: ModelId
    hours_to_complete: Annotated[float, Field(gt=0, le=MAX_HOURS, allow_inf_nan=False)]
    task_id: TaskId = Field(default_factory=lambda: f"mine-{uuid.uuid4().hex[:12]}")
    expected_repo_name: RepoName | None = None
    #: Before what it explains: where the dataset lies.
    file_format: FileFormat = FileFormat.S3
    #: A URL, a file of this machine, or with file_format "hf" a dataset of the hub.
    dataset: Annotated[str, Field(min_length=1)] | None = None
    dataset_type: DatasetType | None = None
    #: A URL or a file of this machine.
    dataset_zip: Annotated[str, Field(min_length=1)] | None = None
    model_type: ImageModelType = ImageModelType.SDXL
    #: A folder of this machine that holds the model, instead of the hub's.
    model_folder: Path | None = None
    #: For `god-miner eval` alone, which reads the same file; a job is trained for what offers are scored on.
    era: Era = Era.OFFERS
    kl_coefficient: Annotated[float, Field(ge=0)] | None = None

    @field_validator("model_folder")
    @classmethod
    def model_folder_is_a_folder(cls, value: Path | None, given: ValidationInfo) -> Path | None:
        if value is None:
            return None
        value = _from(given, value)
        if not value.is_dir():
            raise ValueError(f"{value} is not a directory")
        return value

    @field_validator("dataset", "dataset_zip")
    @classmethod
    def files_are_looked_for_beside_the_task(cls, value: str | None, given: ValidationInfo) -> str | None:
        is_hub = given.field_name == "dataset" and given.data.get("file_format") is FileFormat.HF
        if value is None or is_hub or value.startswith(_URLS):
            return value
        return str(_from(given, Path(value)))

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
        """A path for whatever is no URL and no name on the hub."""
        text = self.dataset or self.dataset_zip or ""
        if text.startswith(_URLS) or (self.dataset and self.file_format is FileFormat.HF):
            return text
        return Path(text).expanduser().absolute()

    def start(self, now: float) -> Start:
        return Start(
            task_id=self.task_id,
            task_type=self.task_type,
            model=self.model,
            hours=self.hours_to_complete,
            expected_repo_name=self.expected_repo_name,
            started_at=now,
            request=self.model_dump_json().encode(),
        )


def read_task_file(
    text: str | bytes, source: str, folder: Path | None = None, *, may_name_files: bool = True
) -> TaskFile:
    """`ConfigError` with every problem. Paths in it are looked for: relative ones in `folder`, where the file
    lies."""
    try:
        task = TaskFile.model_validate_json(text, context={"folder": folder or Path.cwd()})
    except ValidationError as error:
        problems = [
            Problem(
                ".".join(map(str, one["loc"])) or "the file", "", one["msg"].removeprefix("Value error, ")
            )
            for one in error.errors(include_url=False)
        ]
        raise ConfigError(source, problems) from None
    if not may_name_files and (isinstance(task.data, Path) or task.model_folder is not None):
        text = "files of this machine are taken from callers on this machine only; give a URL"
        raise ConfigError(source, [Problem("dataset", "", text)])
    if isinstance(task.data, Path) and not task.data.is_file():
        raise ConfigError(source, [Problem("dataset", str(task.data), "there is no such file")])
    return task


@dataclass(frozen=True, slots=True)
class Task:
    """The parts of a request that a training needs, whoever sent it."""

    task_type: TaskType
    model: str
    data: str | Path
    file_format: FileFormat
    dataset: DatasetType | None
    image_type: ImageModelType | None
    model_folder: Path | None = None

    @property
    def is_hostile(self) -> bool:
        """Code from outside will run: reward functions."""
        return self.task_type is TaskType.GRPO


def task_of(row: JobRow) -> Task:
    """Requests were checked when they came; `StepFailed` for one that an older or newer version stored."""
    try:
        if row.validator == OPERATOR:
            return _own(TaskFile.model_validate_json(row.request))
        if row.task_type is TaskType.IMAGE:
            image = TrainRequestImage.model_validate_json(row.request)
            return Task(row.task_type, image.model, image.dataset_zip, FileFormat.S3, None, image.model_type)
        text = TrainRequestText.model_validate_json(row.request)
        return Task(row.task_type, text.model, text.dataset, text.file_format, text.dataset_type, None)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StepFailed(
            EndReason.BAD_DATA, f"the stored request can't be read: {where}: {first['msg']}"
        ) from None


def _own(task: TaskFile) -> Task:
    image = task.model_type if task.task_type is TaskType.IMAGE else None
    return Task(
        task.task_type, task.model, task.data, task.file_format, task.dataset_type, image, task.model_folder
    )


def wanted_of(row: JobRow, task: Task, folder: JobFolder) -> Wanted:
    return Wanted(
        job_id=row.id,
        task_type=task.task_type,
        model=task.model,
        data=task.data,
        file_format=task.file_format,
        folder=folder.inputs,
        dataset=task.dataset,
        image_type=task.image_type,
        model_folder=task.model_folder,
    )


def spec_of(row: JobRow, task: Task, now: float) -> TaskSpec:
    """What the planner is asked: hours are those that are left."""
    return TaskSpec(
        task_type=task.task_type,
        hours=max(row.deadline_at - now, 0.0) / 3600,
        image_type=task.image_type,
        task_id=row.task_id,
    )


def repo_name(row: JobRow) -> str:
    """As the newest start wants it; a task that named none is published under its own id."""
    return row.expected_repo_name or f"task-{row.task_id}"[:96]


def shown_request(request: bytes) -> Mapping[str, Any]:
    """For people: without the parts that are long or that open something."""
    try:
        found = json.loads(request)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key not in ("dataset", "dataset_zip")}
