"""The orders and events of input workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from core.data.facts import DatasetFacts
from core.domain.job_states import EndReason
from core.domain.records import Record
from core.domain.tasks import DatasetType, FileFormat, ImageModelType
from core.models.facts import ModelFacts
from miner.support.child_main import ChildProtocol


class RetryLimits(Record):
    """Limits on tries and times; shortened in tests."""

    tries: int = 6
    first_pause: float = 1.0
    timeout: float = 30.0


class _FetchOrderBase(Record):
    keep_free: int = 0
    patience: RetryLimits = RetryLimits()


class DatasetOrder(_FetchOrderBase):
    """Fetch a dataset into a directory, check it and profile it."""

    task: Literal["dataset"] = "dataset"
    folder: Path
    #: A URL from a request, or a file of the operator's.
    url: str | None = Field(default=None, repr=False)
    file: Path | None = None
    file_format: FileFormat = FileFormat.S3
    dataset: DatasetType | None = None
    #: Set for a zip of pictures.
    image_type: ImageModelType | None = None
    max_bytes: int
    #: For the download.
    seconds: float = 3600.0
    allowed_networks: tuple[str, ...] = ()


class ModelOrder(_FetchOrderBase):
    """Fetch a model into the cache and identify it."""

    task: Literal["model"] = "model"
    model: str
    image_type: ImageModelType | None = None
    #: The operator's own copy: only identified.
    own: Path | None = None
    endpoint: str
    token: str | None = Field(default=None, repr=False)
    cache: Path
    quota: int


class MeasureOrder(_FetchOrderBase):
    """Measure a dataset's sample with the model's own tokenizer."""

    task: Literal["measure"] = "measure"
    folder: Path
    tokenizer: Path
    dataset: DatasetType


FetchOrder = Annotated[DatasetOrder | ModelOrder | MeasureOrder, Field(discriminator="task")]


class FetchProgress(Record):
    event: Literal["progress"] = "progress"
    #: "dataset", "check" or "model".
    what: str
    done: int
    total: int | None = None


class FetchNote(Record):
    event: Literal["note"] = "note"
    text: str


class FetchFailed(Record):
    event: Literal["failed"] = "failed"
    reason: EndReason
    text: str
    retry_after: float | None = None


class DatasetDone(Record):
    event: Literal["dataset"] = "dataset"
    path: Path
    bytes: int
    sha256: str
    facts: DatasetFacts
    #: True if lengths can be measured with a tokenizer (`MeasureOrder`).
    sampled: bool = False


class ModelDone(Record):
    event: Literal["model"] = "model"
    path: Path
    facts: ModelFacts


class LengthsMeasured(Record):
    event: Literal["measured"] = "measured"
    #: None if the tokenizer is of a kind that cannot be read alone.
    facts: DatasetFacts | None


FetchEvent = Annotated[
    FetchProgress | FetchNote | FetchFailed | DatasetDone | ModelDone | LengthsMeasured,
    Field(discriminator="event"),
]
#: Orders hold a signed URL or the hub's token.
PROTOCOL: ChildProtocol[FetchOrder, FetchEvent] = ChildProtocol(
    "miner.inputs.worker", TypeAdapter(FetchOrder), TypeAdapter(FetchEvent)
)
