"""Alerts, the rules behind them, what rules did about them, and silences."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator

from core.domain.records import Record
from miner.api.base import Answer, Number
from miner.observe.alerts import MINER, AlertSubject

MAX_SILENCE_SECONDS = 365 * 86_400.0


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Alert(Answer):
    """An alert from when it was raised until it was resolved."""

    id: int
    #: A rule of alerts.yaml, or an `AlertKind`.
    rule: str
    #: "miner", "host", "gpu:ID", "job:ID" or "validator:HOTKEY".
    subject: Annotated[str, BeforeValidator(str)]
    severity: Severity
    text: str
    value: float | None
    raised_at: float
    last_at: float
    times: int
    resolved_at: float | None = None
    #: The operator is to be notified of it and of its end; and when that was done last.
    notify: bool = False
    notified_at: float | None = None


class RuleAction(Answer):
    """A rule's request to a running training, and its outcome."""

    id: int
    rule: str
    job_id: int
    attempt: int
    #: "batch" or "duty".
    kind: str
    asked_at: float
    #: Numbers of the training, like `micro`.
    before: dict[str, Number | None]
    after: dict[str, Number | None]
    #: "asked", "applied", "kept", "undone", "refused", "next attempt" or "returned".
    outcome: str
    detail: str
    ended_at: float | None


class Silence(Answer):
    """Alerts of which nobody is notified: patterns like `gpu-*`."""

    id: int
    rule: str
    subject: str
    reason: str
    created_at: float
    until: float


class RuleStatus(Answer):
    """A rule and its state for one subject; without a subject if it has none now."""

    name: str
    metric: str | None
    severity: Severity
    description: str
    limit_text: str
    subject: str
    #: "inactive", "pending" or "firing", and since when.
    state: str
    since: float
    value: Number | None
    detail: str
    #: Nothing was measured the last time.
    no_data: bool
    value_text: str | None


class AlertsPage(Answer):
    """Alerts, newest first; the silences in force; every rule with its state."""

    alerts: list[Alert]
    silences: list[Silence]
    rules: list[RuleStatus]
    #: The error of an edit of the rules that is not in force.
    problem: str | None


class SilenceRequest(Record):
    rule: str = Field(default="*", min_length=1, max_length=100)
    subject: str = Field(default="*", min_length=1, max_length=200)
    seconds: float = Field(gt=0, le=MAX_SILENCE_SECONDS)
    reason: str = Field(default="", max_length=500)


class EndedSilence(Answer):
    ended: int


def _parse_subject(value: object) -> AlertSubject:
    return value if isinstance(value, AlertSubject) else AlertSubject.parse(str(value))


#: In JSON as everywhere: `gpu:ID`, `job:7`, `host`.
_Subject = Annotated[
    AlertSubject,
    PlainValidator(_parse_subject, json_schema_input_type=str),
    PlainSerializer(str, return_type=str),
]


class TrialNotification(Record):
    """A notification to try out."""

    rule: str = Field(default="test", min_length=1, max_length=100)
    subject: _Subject = MINER
    severity: Severity = Severity.INFO
    text: str = Field(default="a test: notifications arrive", max_length=500)


class TrialDelivery(Answer):
    target: str
    #: None: the target took it.
    error: str | None


class TrialReport(Answer):
    targets: list[TrialDelivery]
