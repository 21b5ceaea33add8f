"""Check whether the targets of NOTIFY_URLS take what the daemon sends."""

from __future__ import annotations

from collections.abc import Iterator

from core.domain.errors import GodMinerError
from miner.api.status import DaemonStatus
from miner.daemon_client import get
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.support.findings import Finding, ok, skip, warn

WHAT = "notifications"


def check_notifications(context: CheckContext) -> Iterator[Finding]:
    if not context.settings.notify_urls:
        yield skip(WHAT, "NOTIFY_URLS is not set: alerts are sent to nobody")
        return
    try:
        targets = get(context.settings, "/status", DaemonStatus).notifications
    except GodMinerError as error:
        yield skip(WHAT, f"only a running daemon knows: {error}")
        return
    for target in targets:
        name = target.target
        if target.error:
            text = f"{name} failed {target.failures} times, {target.waiting} wait: {target.error}"
            yield warn(WHAT, text, "correct it in NOTIFY_URLS, restart, and run: god-miner alerts test")
        elif target.sent_at is None:
            yield ok(WHAT, f"{name}: nothing was sent since the start; try: god-miner alerts test")
        else:
            yield ok(WHAT, f"{name} takes them")


NOTIFICATIONS_CHECK = DoctorCheck(WHAT, check_notifications)
