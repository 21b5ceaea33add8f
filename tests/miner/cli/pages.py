"""A job as the daemon describes it."""

from __future__ import annotations

from typing import Any

from miner.api.jobs import AttemptFigures, JobDetails

JOB: dict[str, Any] = {
    "id": 1,
    "task_id": "6f1c2a9e-2f57-4f0e-9d36-0a4f7d1c2b3a",
    "validator": "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY",
    "task_type": "InstructTextTask",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "hours": 1.0,
    "state": "training",
    "end_reason": "crashed",
    "detail": "",
    "meaning": None,
    "request": {},
    "expected_repo_name": "repo-1",
    "submission": None,
    "submitted_at": None,
    "started_at": 0.0,
    "deadline_at": 3600.0,
    "ended_at": None,
    "took_s": None,
    "starts": 1,
    "live": None,
    "result": None,
    "folder": "/var/lib/god-miner/jobs/1",
    "attempts": [
        {
            "number": 1,
            "backend": "docker",
            "key": "gm-1-1",
            "gpus": ["0", "1"],
            "folder": "/var/lib/god-miner/jobs/1/attempt_1",
            "started_at": 0.0,
            "end_by": None,
            "ended_at": 60.0,
            "end_reason": "oom",
            "meaning": None,
            "detail": "",
            "result": None,
            "figures": AttemptFigures().model_dump(),
            "target": "",
            "losses": [],
        }
    ],
    "steps": [
        {"name": "fetch", "attempt": None, "began_at": 0.0, "ended_at": 2.0, "outcome": "ok", "detail": ""}
    ],
    "actions": [],
}


def job_details(**changes: Any) -> JobDetails:
    return JobDetails.model_validate({**JOB, **changes})
