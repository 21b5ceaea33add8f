"""A synthetic history: jobs, decisions, figures, roll-ups and ranks, as a daemon stores them."""

from __future__ import annotations

import json
from sqlite3 import Connection
from typing import Any

from core.domain.decisions import ExpectedValue
from core.domain.tasks import TaskType
from miner.api.reports import Rank
from miner.store.database import insert_row

HOUR, DAY = 3600.0, 86_400.0
#: A Monday at noon.
NOW = 1_760_000_400.0 - 1_760_000_400.0 % (7 * DAY) + 4 * DAY + 12 * HOUR


def add_job(
    connection: Connection,
    task_id: str,
    ended_at: float,
    *,
    state: str = "done",
    reason: str = "published",
    hours: float = 4.0,
    took: float = 2.0,
    task_type: TaskType = TaskType.INSTRUCT,
    model: str = "org/Llama-3.1-8B",
    params: int = 8_000_000_000,
    value: ExpectedValue | None = None,
    gain: float | None = None,
    target_missed: bool | None = None,
) -> int:
    """Add an accepted offer, its job that has ended, and what its attempt reached."""
    details = json.dumps({"value": value._asdict()} if value else {})
    common: dict[str, Any] = {"validator": "v1", "task_id": task_id, "task_type": task_type, "model": model}
    started_at = ended_at - took * HOUR
    offer_id = insert_row(
        connection,
        "offers",
        **common,
        params=params,
        hours=hours,
        received_at=started_at - 60,
        last_seen_at=started_at - 60,
        times_seen=1,
        raw=b"{}",
    )
    decision_id = insert_row(
        connection,
        "decisions",
        offer_id=offer_id,
        accepted=1,
        message="",
        factors="{}",
        reasons="[]",
        details=details,
        policy="test",
        policy_hash="",
        decided_at=started_at - 60,
    )
    connection.execute("UPDATE offers SET decision_id = ? WHERE id = ?", (decision_id, offer_id))
    done = state == "done"
    job_id = insert_row(
        connection,
        "jobs",
        **common,
        hours=hours,
        state=state,
        end_reason=reason,
        ended_at=ended_at,
        started_at=started_at,
        deadline_at=started_at + hours * HOUR,
        starts=1,
        request=b"{}",
        submission_repo="me/model" if done else None,
        submitted_at=ended_at if done else None,
        lock_token=1,
        updated_at=ended_at,
    )
    if gain is not None:
        attempt_id = insert_row(
            connection,
            "attempts",
            job_id=job_id,
            number=1,
            backend="process",
            key=f"k{job_id}",
            folder="",
            gpus="[]",
            started_at=started_at,
        )
        figures: dict[str, Any] = {"base": 2.0, "best": 2.0 * (1 - gain), "metric": "loss", "gain": gain}
        if target_missed is not None:
            figures |= {"target": "15 % better than the base", "target_missed": target_missed}
        insert_row(
            connection, "attempt_figures", attempt_id=attempt_id, figures=json.dumps(figures), curves="{}"
        )
    return job_id


def add_rollup(
    connection: Connection,
    at: float,
    gpu: str = "g0",
    *,
    busy: float = 1.0,
    utilization: float | None = 0.9,
    period: int = 3600,
) -> None:
    insert_row(
        connection,
        "gpu_rollups",
        period=period,
        at=int(at),
        gpu=gpu,
        busy=busy,
        samples=period // 5,
        utilization=utilization,
    )


def rank_row(
    at: float, rank: int, *, miners: int = 200, emission: float = 0.5, tao_per_day: float | None = None
) -> Rank:
    return Rank(
        at=at,
        block=1,
        uid=7,
        rank=rank,
        miners=miners,
        incentive=0.01,
        emission=emission,
        tao_per_day=tao_per_day,
    )
