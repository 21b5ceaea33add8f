"""What doctor says of the targets of notifications, by the running daemon's word."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from miner.api.status import DaemonStatus, NotificationTarget
from miner.daemon_client import NoDaemon
from miner.doctor import CheckContext, FindingStatus
from miner.doctor.checks import notifications
from miner.settings import load_settings

SECRET = "bot-token-0123456789"


def found(monkeypatch: pytest.MonkeyPatch, page: Any, **env: str) -> list[tuple[FindingStatus, str]]:
    targets = [] if isinstance(page, Exception) else [NotificationTarget(**target) for target in page]
    answer = DaemonStatus.model_construct(notifications=targets)
    failure = page if isinstance(page, Exception) else None
    monkeypatch.setattr(notifications, "get", Mock(return_value=answer, side_effect=failure))
    context = CheckContext(load_settings(env=env, env_file=None))
    return [(finding.status, finding.detail) for finding in notifications.check_notifications(context)]


def test_a_target_that_fails_is_named_with_its_reason_and_without_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = [
        {"target": "tgram", "waiting": 2, "failures": 3, "error": "error=401", "sent_at": None},
        {"target": "json://10.0.0.1", "waiting": 0, "failures": 0, "error": None, "sent_at": 1.0},
    ]
    rows = found(monkeypatch, page, NOTIFY_URLS=f"tgram://{SECRET}/1 json://10.0.0.1/")
    assert [status for status, _ in rows] == [FindingStatus.WARN, FindingStatus.OK]
    assert rows[0][1] == "tgram failed 3 times, 2 wait: error=401"
    assert SECRET not in str(rows)


def test_without_targets_or_without_a_daemon_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [status for status, _ in found(monkeypatch, [])] == [FindingStatus.SKIP]
    rows = found(monkeypatch, NoDaemon("no daemon runs"), NOTIFY_URLS="json://10.0.0.1/")
    assert [status for status, _ in rows] == [FindingStatus.SKIP]
