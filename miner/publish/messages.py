"""The orders and events of publishing processes."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from core.domain.records import Record
from core.domain.tasks import ImageModelType, TaskType
from miner.support.child_main import ChildProtocol


class PublishTask(StrEnum):
    PUBLISH = "publish"
    MOVE = "move"
    #: Identify the token and its rights.
    ACCOUNT = "account"


class PublishOrder(Record):
    """Tasks of a publishing process."""

    task: PublishTask
    #: A directory for HUB=local, or None for the hub at `endpoint`.
    local: str | None = None
    endpoint: str = ""
    token: str | None = Field(default=None, repr=False)
    user: str | None = None
    repo_name: str = ""
    #: Fields of `publish`.
    folder: str = ""
    task_type: TaskType | None = None
    model: str | None = None
    base: str | None = None
    image_type: ImageModelType | None = None
    keep_card: bool = False
    #: `owner/name` of what was published before.
    earlier: str | None = None
    #: The file of the `FingerprintCache`.
    memory: str | None = None


class PublishTrouble(StrEnum):
    """Why an order failed."""

    TOKEN = "token"  # noqa: S105 - a word for what is wrong with one
    FORBIDDEN = "forbidden"
    REFUSED = "refused"
    RATE_LIMITED = "rate_limited"
    CONFLICT = "conflict"
    SERVER = "server"
    NETWORK = "network"
    MISMATCH = "mismatch"
    BAD_SUBMISSION = "bad_submission"
    GONE = "gone"
    DISK_FULL = "disk_full"
    CRASHED = "crashed"


class PublishProgress(Record):
    event: Literal["progress"] = "progress"
    what: Literal["check", "upload"]
    done: int
    total: int


class PublishNote(Record):
    """Note for the operator: what was mended or left out, what the client waits for."""

    event: Literal["note"] = "note"
    text: str


class PublishedRepo(Record):
    event: Literal["published"] = "published"
    repo: str
    model_hash: str | None
    commit: str | None = None
    files: int = 0
    size: int = 0
    #: Bytes that were really sent; with deduplication fewer than `size`.
    sent: int = 0


class HubAccount(Record):
    event: Literal["account"] = "account"
    user: str
    #: The account that submissions would go to.
    owner: str
    may_write: bool
    detail: str


class PublishFailed(Record):
    event: Literal["failed"] = "failed"
    trouble: PublishTrouble
    text: str
    retry_after: float | None = None


PublishEvent = Annotated[
    PublishProgress | PublishNote | PublishedRepo | HubAccount | PublishFailed,
    Field(discriminator="event"),
]
#: Orders hold the hub's token.
PROTOCOL: ChildProtocol[PublishOrder, PublishEvent] = ChildProtocol(
    "miner.publish.worker", TypeAdapter(PublishOrder), TypeAdapter(PublishEvent)
)


class HubTrouble(Exception):
    """Raised inside the publishing process, and reported as `PublishFailed`."""

    def __init__(self, trouble: PublishTrouble, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.trouble = trouble
        self.retry_after = retry_after
