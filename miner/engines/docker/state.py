"""What Docker's `inspect` says of a container, as a phase."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from miner.engines.base import Phase, Status, Why
from miner.engines.outcome import Word, ended
from miner.engines.records import read_start

#: How Docker writes "never".
_NEVER = "0001-01-01T00:00:00Z"
_GOES_ON = {
    "running": "",
    "paused": "the container is paused: `docker unpause` lets it go on",
    "restarting": "Docker starts the container again",
}


def never_started(inspected: Mapping[str, Any]) -> bool:
    state = inspected.get("State") or {}
    return state.get("Status") == "created" and state.get("StartedAt", _NEVER) == _NEVER


def was_cut_off(inspected: Mapping[str, Any], run_dir: Path) -> bool:
    """Docker died while it started the container, and did not note that it had."""
    return never_started(inspected) and read_start(run_dir) is not None


def status_of(inspected: Mapping[str, Any], run_dir: Path) -> Status:
    state = inspected.get("State") or {}
    name = str(state.get("Status"))
    started = moment(state.get("StartedAt"))
    if name in _GOES_ON:
        return Status(Phase.RUNNING, started_at=started, detail=_GOES_ON[name])
    problem = str(state.get("Error") or "")
    if was_cut_off(inspected, run_dir):
        return ended(run_dir, Word(detail="Docker died while it started it"))
    if never_started(inspected):
        if not problem:
            return Status(Phase.QUEUED, detail="made, and not started yet")
        return Status(
            Phase.ENDED, Why.FAILED, state.get("ExitCode"), detail=f"not startable: {problem[:500]}"
        )
    return ended(
        run_dir,
        Word(
            code=int(state.get("ExitCode") or 0),
            oom_killed=bool(state.get("OOMKilled")),
            started_at=started,
            ended_at=moment(state.get("FinishedAt")),
            detail=problem[:500],
        ),
    )


def moment(text: object) -> float | None:
    """Seconds since the epoch. Docker writes nanoseconds, Python reads at most six digits."""
    if not isinstance(text, str) or text == _NEVER:
        return None
    head, dot, tail = text.partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    zone = tail[len(digits) :] if dot else ""
    try:
        return datetime.fromisoformat(f"{head}{dot}{digits[:6]}{zone}").timestamp()
    except (ValueError, OverflowError):
        return None
