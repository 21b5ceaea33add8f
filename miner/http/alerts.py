"""Alerts on the operator's port: list them and the rules behind them, silence some."""

from __future__ import annotations

import sqlite3
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from core.domain.errors import GodMinerError
from miner.api.alerts import (
    Alert,
    AlertsPage,
    EndedSilence,
    Silence,
    SilenceRequest,
    TrialDelivery,
    TrialNotification,
    TrialReport,
)
from miner.http.operator import MAX_ROW, Daemon, operator_only
from miner.store import alerts as store_alerts
from miner.store.alerts import AlertRow

MAX_ALERTS_LISTED = 1000


class NobodyNotified(GodMinerError):
    """There is no channel to send anything to."""

    code = "nobody_notified"


router = APIRouter(dependencies=[Depends(operator_only)])


@router.get("/alerts")
async def list_alerts(
    daemon: Daemon,
    limit: Annotated[int, Query(ge=1, le=MAX_ALERTS_LISTED)] = 100,
    open_only: Annotated[bool, Query(alias="open")] = False,
) -> AlertsPage:
    """List alerts, newest first; every rule with its state; the silences in force."""
    now = daemon.clock()

    def query(connection: sqlite3.Connection) -> tuple[list[Alert], list[Silence]]:
        alerts = store_alerts.newest_alerts(connection, limit, only_open=open_only)
        return Alert.of_each(alerts), store_alerts.silences_in_force(connection, now)

    alerts, silences = await daemon.store.read(query)
    service = daemon.alert_service
    return AlertsPage(
        alerts=alerts, silences=silences, rules=service.rule_states(), problem=service.rules.problem
    )


@router.post("/alerts/silences", status_code=HTTPStatus.CREATED)
async def add_silence(silence: SilenceRequest, daemon: Daemon) -> Silence:
    """Notify nobody of alerts like `gpu-*` for a while; they are still stored and shown."""
    now = daemon.clock()
    return await daemon.store.write(
        store_alerts.add_silence, silence.rule, silence.subject, silence.reason, now, now + silence.seconds
    )


@router.post("/alerts/test")
async def send_test(daemon: Daemon, test: TrialNotification | None = None) -> TrialReport:
    """Send a notification to every target now, without storing or counting it as an alert. Return each
    target's result."""
    if not daemon.settings.notify_urls:
        raise NobodyNotified("nobody is notified: NOTIFY_URLS names no target")
    wanted, now = test or TrialNotification(), daemon.clock()
    alert = AlertRow(wanted.rule, wanted.subject, wanted.severity, wanted.text, raised_at=now, last_at=now)
    deliveries = await daemon.notifier.test(alert)
    return TrialReport(
        targets=[
            TrialDelivery(target=delivery.target, error=delivery.error or None) for delivery in deliveries
        ]
    )


@router.delete("/alerts/silences/{silence}")
async def end_silence(silence: Annotated[int, Path(ge=1, le=MAX_ROW)], daemon: Daemon) -> EndedSilence:
    """End a silence before its time."""
    await daemon.store.write(store_alerts.end_silence, silence, daemon.clock())
    return EndedSilence(ended=silence)
