"""What the daemon and a publishing process say to each other: an order on standard input, events as JSON
lines on standard output. The token travels in the order and nowhere else, not in arguments, environment or
files."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from core.facts import Record
from core.tasks import TaskType

#: A longer line is not one of ours.
MAX_LINE = 1 << 20


class Task(StrEnum):
    PUBLISH = "publish"
    MOVE = "move"
    #: Whose token is this, and what may it do?
    ACCOUNT = "account"


class Order(Record):
    """What a publishing process is to do."""

    task: Task
    #: A folder, for HUB=local; None is the hub at `endpoint`.
    local: str | None = None
    endpoint: str = ""
    token: str | None = Field(default=None, repr=False)
    user: str | None = None
    repo_name: str = ""
    #: Of `publish`.
    folder: str = ""
    task_type: TaskType | None = None
    model: str | None = None
    base: str | None = None
    keep_card: bool = False
    #: `owner/name` of what was published before.
    earlier: str | None = None
    #: Where what was read once is remembered.
    memory: str | None = None


class Trouble(StrEnum):
    """Why it came to nothing."""

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


class Stage(Record):
    event: Literal["stage"] = "stage"
    stage: str


class Progress(Record):
    event: Literal["progress"] = "progress"
    what: Literal["check", "upload"]
    done: int
    total: int


class Note(Record):
    """For people: what was mended or left out, what the client waits for."""

    event: Literal["note"] = "note"
    text: str


class Published(Record):
    event: Literal["published"] = "published"
    repo: str
    model_hash: str | None
    commit: str | None = None
    files: int = 0
    size: int = 0
    #: Bytes that were really sent; with deduplication fewer than `size`.
    sent: int = 0


class Account(Record):
    event: Literal["account"] = "account"
    user: str
    #: Where submissions would go.
    owner: str
    may_write: bool
    detail: str


class Failed(Record):
    event: Literal["failed"] = "failed"
    trouble: Trouble
    text: str
    retry_after: float | None = None


Event = Annotated[
    Stage | Progress | Note | Published | Account | Failed,
    Field(discriminator="event"),
]
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def event_in(line: bytes) -> Event | None:
    """The event of a line; None for anything else that a process may print."""
    try:
        return _EVENT.validate_json(line)
    except ValidationError:
        return None


class HubTrouble(Exception):
    """Raised inside the publishing process, and told as `Failed`."""

    def __init__(self, trouble: Trouble, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.trouble = trouble
        self.retry_after = retry_after
