"""Short texts about a job on pages."""

from __future__ import annotations

from typing import Any

from miner.dashboard.job_texts import shown_target


def test_the_target_shown_is_that_of_the_attempt_with_the_result() -> None:
    attempts = [
        {"number": 1, "target": "loss below 0.064: not reached"},
        {"number": 2, "target": "loss below 0.064: not measured"},
    ]
    job: dict[str, Any] = {"attempts": attempts, "result": {"attempt": 1}}
    assert shown_target(job) == "target loss below 0.064: not reached"
    assert shown_target({**job, "result": None}) == "target loss below 0.064: not measured"
    assert shown_target({"attempts": [{"number": 1, "target": ""}], "result": None}) == ""
    assert shown_target({"attempts": [], "result": None}) == ""
