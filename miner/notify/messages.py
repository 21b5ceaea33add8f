"""Messages between the daemon and the notification worker."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from core.domain.records import Record
from miner.support.child_main import ChildProtocol


class NotifyMessage(Record):
    title: str
    body: str
    format: Literal["text", "markdown", "html"] = "text"
    #: Apprise's words.
    type: Literal["info", "success", "warning", "failure"] = "info"


class TargetOrder(Record):
    """A target by its URL, which is a secret, and what it is to get, in order."""

    number: int
    url: str
    messages: tuple[NotifyMessage, ...]


class NotifyOrder(Record):
    targets: tuple[TargetOrder, ...]
    #: Time for each target, all of them at once.
    seconds: float


class TargetResult(Record):
    """The result of one target: how many of its messages it took, and why no more."""

    event: Literal["target"] = "target"
    number: int
    delivered: int
    error: str = ""


class NotifyDone(Record):
    event: Literal["done"] = "done"


class NotifyFailed(Record):
    event: Literal["failed"] = "failed"
    text: str


NotifyEvent = Annotated[TargetResult | NotifyDone | NotifyFailed, Field(discriminator="event")]
PROTOCOL: ChildProtocol[NotifyOrder, NotifyEvent] = ChildProtocol(
    "miner.notify.worker", TypeAdapter(NotifyOrder), TypeAdapter(NotifyEvent)
)
