"""Alerts: counted, logged and stored; good news only logged and stored."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from core.domain.job_states import END_MEANINGS, RetryRule
from miner.observe.alerts import AlertKind, Alerts
from miner.observe.metrics import Metrics
from miner.store.database import StoreUnavailable


class Recorder:
    is_open = True

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def add_event(self, kind: str, task_id: str | None = None, **data: Any) -> asyncio.Future[None]:
        if not self.is_open:
            raise StoreUnavailable("closed")
        self.events.append((kind, data))
        return asyncio.get_running_loop().create_future()


async def test_alerts_are_counted_and_marked_and_good_news_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    recorder, metrics = Recorder(), Metrics()
    alerts = Alerts(metrics, recorder)
    alerts(AlertKind.GPU_LOST, "GPU 3 is gone", "3")
    alerts(AlertKind.GPU_BACK, "GPU 3 is back")
    assert recorder.events == [
        ("gpu_lost", {"text": "GPU 3 is gone", "gpu": "3", "alert": True}),
        ("gpu_back", {"text": "GPU 3 is back"}),
    ]
    page = metrics.render().decode()
    assert 'god_miner_alerts_total{kind="gpu_lost"} 1.0' in page
    assert "gpu_back" not in page
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels == {"alert gpu_lost: GPU 3 is gone": "WARNING", "gpu_back: GPU 3 is back": "INFO"}


async def test_a_store_that_is_closed_loses_the_event_and_nothing_else() -> None:
    recorder, metrics = Recorder(), Metrics()
    recorder.is_open = False
    Alerts(metrics, recorder)(AlertKind.GPU_OUT, "GPU 3")
    assert 'god_miner_alerts_total{kind="gpu_out"} 1.0' in metrics.render().decode()


def test_every_reason_that_is_waited_out_has_an_alert() -> None:
    waited_out = [reason for reason, meaning in END_MEANINGS.items() if meaning.retry is RetryRule.WAIT]
    assert {f"job_{reason}" for reason in waited_out} <= set(AlertKind)
