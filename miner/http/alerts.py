"""Alerts on the operator's port: list them and the rules behind them, silence some."""

from __future__ import annotations

import sqlite3
from http import HTTPStatus
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BeforeValidator, Field

from core.domain.errors import GodMinerError
from core.domain.records import Record
from miner.alerts.service import AlertService
from miner.http.operator import MAX_ROW, operator_only
from miner.notify.notifier import Notifier
from miner.observe.alerts import MINER, AlertSubject
from miner.settings import Settings
from miner.store import alerts as store_alerts
from miner.store.alerts import AlertRow, Severity
from miner.store.store import Store

MAX_ALERTS_LISTED = 1000
MAX_SILENCE_SECONDS = 365 * 86_400.0


class HasAlerts(Protocol):
    """The part of the daemon that these routes need."""

    @property
    def settings(self) -> Settings: ...

    @property
    def store(self) -> Store: ...

    @property
    def alert_service(self) -> AlertService: ...

    @property
    def notifier(self) -> Notifier: ...

    def clock(self) -> float: ...


class SilenceRequest(Record):
    rule: str = Field(default="*", min_length=1, max_length=100)
    subject: str = Field(default="*", min_length=1, max_length=200)
    seconds: float = Field(gt=0, le=MAX_SILENCE_SECONDS)
    reason: str = Field(default="", max_length=500)


class TrialNotification(Record):
    """A notification to try out."""

    rule: str = Field(default="test", min_length=1, max_length=100)
    subject: Annotated[AlertSubject, BeforeValidator(AlertSubject.parse)] = MINER
    severity: Severity = Severity.INFO
    text: str = Field(default="a test: notifications arrive", max_length=500)


class NobodyNotified(GodMinerError):
    """There is no channel to send anything to."""

    code = "nobody_notified"


def alerts_dependency(request: Request) -> HasAlerts:
    daemon: HasAlerts = request.app.state.daemon
    return daemon


AlertsOf = Annotated[HasAlerts, Depends(alerts_dependency)]


def build_alerts_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/alerts", list_alerts, methods=["GET"])
    router.add_api_route("/alerts/silences", add_silence, methods=["POST"], status_code=HTTPStatus.CREATED)
    router.add_api_route("/alerts/test", send_test, methods=["POST"])
    router.add_api_route("/alerts/silences/{silence}", end_silence, methods=["DELETE"])
    return router


async def list_alerts(
    daemon: AlertsOf,
    limit: Annotated[int, Query(ge=1, le=MAX_ALERTS_LISTED)] = 100,
    open_only: Annotated[bool, Query(alias="open")] = False,
) -> dict[str, Any]:
    """Alerts, newest first; every rule with its state; the silences in force."""
    now = daemon.clock()

    def query(connection: sqlite3.Connection) -> dict[str, Any]:
        alerts = store_alerts.newest_alerts(connection, limit, only_open=open_only)
        silences = store_alerts.silences_in_force(connection, now)
        return {
            "alerts": [row.as_dict() for row in alerts],
            "silences": [row.as_dict() for row in silences],
        }

    found = await daemon.store.read(query)
    service = daemon.alert_service
    return {**found, "rules": service.rule_states(), "problem": service.rules.problem}


async def add_silence(silence: SilenceRequest, daemon: AlertsOf) -> dict[str, Any]:
    """Notify nobody of some alerts for a while; they are still stored and shown."""
    now = daemon.clock()
    row = await daemon.store.write(
        store_alerts.add_silence, silence.rule, silence.subject, silence.reason, now, now + silence.seconds
    )
    return row.as_dict()


async def send_test(daemon: AlertsOf, test: TrialNotification | None = None) -> dict[str, Any]:
    """Send a notification that is no alert, neither stored nor counted, to every target now; say of each
    whether it took it."""
    if not daemon.settings.notify_urls:
        raise NobodyNotified("nobody is notified: NOTIFY_URLS names no target")
    wanted, now = test or TrialNotification(), daemon.clock()
    alert = AlertRow(wanted.rule, wanted.subject, wanted.severity, wanted.text, raised_at=now, last_at=now)
    deliveries = await daemon.notifier.test(alert)
    return {"targets": [{"target": one.target, "error": one.error or None} for one in deliveries]}


async def end_silence(silence: Annotated[int, Path(ge=1, le=MAX_ROW)], daemon: AlertsOf) -> dict[str, Any]:
    """End a silence before its time."""
    await daemon.store.write(store_alerts.end_silence, silence, daemon.clock())
    return {"ended": silence}
