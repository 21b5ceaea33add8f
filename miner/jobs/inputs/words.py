"""What the daemon and a worker say to each other: one order on standard input, then events as JSON lines.

The order's secrets, a signed URL and the hub's token, travel here and nowhere else: not in arguments, the
environment, files or logs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from core.data import DatasetFacts
from core.facts import Record
from core.models import ModelFacts
from core.tasks import DatasetType, FileFormat, ImageModelType
from miner.jobs.states import EndReason

#: A longer line is not one of ours.
MAX_LINE = 1024**2


class Patience(Record):
    """How often and how long; shortened in tests."""

    tries: int = 6
    first_pause: float = 1.0
    timeout: float = 30.0


class _Order(Record):
    keep_free: int = 0
    patience: Patience = Patience()


class DatasetOrder(_Order):
    """Fetch a dataset into a folder, check it, look at it."""

    task: Literal["dataset"] = "dataset"
    folder: Path
    #: A URL from a request; or a file of the operator's own.
    url: str | None = Field(default=None, repr=False)
    file: Path | None = None
    file_format: FileFormat = FileFormat.S3
    dataset: DatasetType | None = None
    #: Then it is a zip of pictures.
    image_type: ImageModelType | None = None
    max_bytes: int
    #: For the download.
    seconds: float = 3600.0
    allowed_networks: tuple[str, ...] = ()


class ModelOrder(_Order):
    """Have a model in the cache, and look at it."""

    task: Literal["model"] = "model"
    model: str
    image_type: ImageModelType | None = None
    #: The operator's own copy: only looked at.
    own: Path | None = None
    endpoint: str
    token: str | None = Field(default=None, repr=False)
    cache: Path
    quota: int


class MeasureOrder(_Order):
    """Measure a dataset's sample with the model's own tokenizer."""

    task: Literal["measure"] = "measure"
    folder: Path
    tokenizer: Path
    dataset: DatasetType


Order = Annotated[DatasetOrder | ModelOrder | MeasureOrder, Field(discriminator="task")]
ORDER: TypeAdapter[Order] = TypeAdapter(Order)


class Progress(Record):
    event: Literal["progress"] = "progress"
    #: "dataset", "check" or "model".
    what: str
    done: int
    total: int | None = None


class Note(Record):
    event: Literal["note"] = "note"
    text: str


class Failed(Record):
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
    #: Whether lengths can be measured with a tokenizer (`MeasureOrder`).
    sampled: bool = False


class ModelDone(Record):
    event: Literal["model"] = "model"
    path: Path
    facts: ModelFacts


class Measured(Record):
    event: Literal["measured"] = "measured"
    #: None when the tokenizer is of a kind that can't be read alone.
    facts: DatasetFacts | None


Event = Annotated[Progress | Note | Failed | DatasetDone | ModelDone | Measured, Field(discriminator="event")]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def event_in(line: bytes) -> Event | None:
    """None for what is no event: libraries print what they like."""
    try:
        return _EVENT.validate_json(line)
    except ValidationError:
        return None


def order_in(line: bytes) -> Order:
    return ORDER.validate_json(line)


def line_of(message: Any) -> bytes:
    found: str = message.model_dump_json()
    return found.encode() + b"\n"
