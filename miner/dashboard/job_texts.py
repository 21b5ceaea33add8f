"""Jobs in one line: title, state, scores, time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from miner.dashboard.node_rows import gpu_name
from miner.dashboard.parts import Tone, clock, duration, number, percent, short_model

Record = Mapping[str, Any]

_STATE_TONES: dict[str, Tone] = {
    "queued": "muted",
    "preparing": "live",
    "training": "live",
    "publishing": "live",
    "done": "good",
    "failed": "bad",
    "cancelled": "muted",
}
_STAGES = {
    "model": "fetches the model",
    "dataset": "fetches the rows",
    "gpus": "waits for GPUs",
    "data": "reads the rows",
    "load": "loads the model",
    "search": "tries learning rates",
    "eval": "evaluates",
    "save": "saves",
}
_SEVERITIES: dict[str, Tone] = {"critical": "bad", "warning": "warn", "info": "live"}


def job_title(job: Record) -> str:
    return f"#{job['id']} {short_model(job['model'])}"


def task_name(task_type: str) -> str:
    """`InstructTextTask` is instruct."""
    return task_type.removesuffix("Task").removesuffix("Text").lower()


def state_text(job: Record) -> tuple[str, Tone]:
    """The state, or what is being done in it."""
    stage = _STAGES.get((job.get("live") or {}).get("stage") or "")
    state = str(job["state"])
    return (stage if stage and state in ("preparing", "training") else state), _STATE_TONES.get(state, "")


def scores(job: Record) -> str:
    """Held-out score of the base and the best so far."""
    live, result = job.get("live") or {}, job.get("result") or {}
    base = live.get("base_score")
    best = live.get("best_score")
    if base is None:
        base = result.get("base")
    if best is None:
        best = result.get("best")
    if best is None:
        return ""
    if base is None:
        return f"held out {number(best)}"
    return f"held out {number(base)} → {number(best)}"


def gain_text(base: float | None, best: float | None, *, lower_is_better: bool | None) -> str:
    """How much better than the base, in percent."""
    if base is None or best is None or abs(base) < 1e-12:
        return ""
    gain = (base - best if lower_is_better is not False else best - base) / abs(base)
    return f"{percent(abs(gain), 1)} {'better' if gain >= 0 else 'worse'} than the base"


def shown_target(job: Record) -> str:
    """The profile's target, and whether the attempt with the result, else the newest, reached it."""
    attempts, result = job.get("attempts") or [], job.get("result") or {}
    chosen = [attempt for attempt in attempts if attempt["number"] == result.get("attempt")] or attempts[-1:]
    target = chosen[0].get("target") if chosen else ""
    return f"target {target}" if target else ""


def deadline_text(job: Record) -> tuple[str, Tone]:
    """The time that is left; a warning where the job will not be over by then."""
    left = job["deadline_at"] - time.time()
    if left < 0:
        return f"deadline was {clock(job['deadline_at'])}", "bad"
    ends_at = (job.get("live") or {}).get("ends_at")
    late = ends_at is not None and ends_at > job["deadline_at"]
    return f"{duration(left)} to deadline", "warn" if late else "muted"


def gpu_names(fleet: Record) -> dict[str, str]:
    """The GPUs' numbers by id; of a node its id."""
    return {gpu["id"]: gpu_name(gpu) for gpu in fleet["gpus"]}


def subject_text(one: Record) -> str:
    """What an alert is about. The id of a validator or GPU is longer than what distinguishes it."""
    subject = str(one["subject"])
    return subject if len(subject) <= 24 else f"{subject[:23]}…"


def alert_tone(alert: Record) -> Tone:
    return _SEVERITIES.get(str(alert["severity"]), "warn")
