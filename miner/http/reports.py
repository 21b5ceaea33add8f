"""Reports on the operator's port."""

from __future__ import annotations

import sqlite3
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from miner.api.reports import PeriodKind, Report
from miner.http.operator import operator_only
from miner.observe.redact import Redactor
from miner.reports.periods import calendar_period, last_period

#: The year 2100: calendars end somewhere.
MAX_MOMENT = 4_102_444_800


def build_reports_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/report", report, methods=["GET"])
    return router


async def report(
    request: Request,
    period: PeriodKind = PeriodKind.DAILY,
    at: Annotated[float | None, Query(ge=0, le=MAX_MOMENT, allow_inf_nan=False)] = None,
) -> Report:
    """Report the last day, week or month; with `at`, seconds since the epoch, the calendar period around
    it."""
    from miner.reports.report import (  # some milliseconds that the start need not take
        build_report,
        redacted_report,
    )

    daemon = request.app.state.daemon
    wanted = last_period(period, daemon.clock()) if at is None else calendar_period(period, at)
    policy = daemon.policy_runtime.policy.terms
    redact = Redactor(daemon.settings.secrets())

    def query(connection: sqlite3.Connection) -> Report:
        return redacted_report(build_report(connection, wanted, policy), redact)

    return await daemon.store.read(query)  # type: ignore[no-any-return]
