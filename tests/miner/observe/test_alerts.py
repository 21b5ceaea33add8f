"""Alerts are counted, logged and passed on; good news is only logged and passed on."""

from __future__ import annotations

import logging

import pytest

from core.domain.job_states import END_MEANINGS, RetryRule
from miner.observe.alerts import (
    HOST,
    MINER,
    STEP_FAILURES,
    AlertKind,
    Alerts,
    AlertSubject,
    gpu_subject,
    job_subject,
)
from miner.observe.metrics import Metrics


def test_alerts_are_counted_and_good_news_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    passed_on: list[tuple[AlertKind, str, AlertSubject]] = []
    metrics = Metrics()

    def listen(kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        passed_on.append((kind, text, subject))
        raise OSError("whatever a listener raises is not the caller's concern")

    alerts = Alerts(metrics, listen)
    alerts(AlertKind.GPU_LOST, "it is gone", gpu_subject("3"))
    alerts(AlertKind.GPU_BACK, "all are back")
    assert passed_on == [
        (AlertKind.GPU_LOST, "it is gone", gpu_subject("3")),
        (AlertKind.GPU_BACK, "all are back", MINER),
    ]
    page = metrics.render().decode()
    assert 'god_miner_alerts_total{kind="gpu_lost"} 1.0' in page
    assert "gpu_back" not in page
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["alert gpu_lost: GPU 3: it is gone"] == "WARNING"
    assert levels["gpu_back: all are back"] == "INFO"


def test_a_subject_is_read_back_from_its_text() -> None:
    subjects = (MINER, HOST, job_subject(7), gpu_subject("n1:GPU-0"))
    assert [str(subject) for subject in subjects] == ["miner", "host", "job:7", "gpu:n1:GPU-0"]
    assert tuple(AlertSubject.parse(str(subject)) for subject in subjects) == subjects
    assert job_subject(7).fields == {"subject": "job:7", "job_id": 7}
    with pytest.raises(ValueError, match="'card:1' is not a subject"):
        AlertSubject.parse("card:1")


def test_every_reason_that_is_waited_out_has_an_alert() -> None:
    waited_out = {reason for reason, meaning in END_MEANINGS.items() if meaning.retry is RetryRule.WAIT}
    assert waited_out == STEP_FAILURES.keys()
