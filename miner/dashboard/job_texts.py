"""Jobs in one line: title, state, scores, time."""

from __future__ import annotations

import time

from core.domain.units import show_dollars
from miner.api.alerts import Severity
from miner.api.fleet import FleetStatus
from miner.api.jobs import JobDetails, JobSummary, LiveJob
from miner.api.offers import ChangedAnswer, OfferSummary
from miner.dashboard.node_rows import gpu_name
from miner.dashboard.parts import Tone, clock, duration, number, percent, short_model

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
_SEVERITIES: dict[Severity, Tone] = {
    Severity.CRITICAL: "bad",
    Severity.WARNING: "warn",
    Severity.INFO: "live",
}
#: The live state of a job that no worker has.
NOT_LIVE = LiveJob(0, "", "")


def job_title(job: JobSummary) -> str:
    return f"#{job.id} {short_model(job.model)}"


def task_name(task_type: str) -> str:
    """`InstructTextTask` is instruct."""
    return task_type.removesuffix("Task").removesuffix("Text").lower()


def state_text(job: JobSummary) -> tuple[str, Tone]:
    """The state, or what is being done in it."""
    stage = _STAGES.get(job.live.stage if job.live else "")
    state = job.state.value
    return (stage if stage and state in ("preparing", "training") else state), _STATE_TONES.get(state, "")


def held_out(job: JobSummary) -> tuple[float | None, float | None]:
    """Return the held-out score of the base and the best so far."""
    live, result = job.live or NOT_LIVE, job.result
    base, best = live.base_score, live.best_score
    if base is None and result is not None:
        base = result.base
    if best is None and result is not None:
        best = result.best
    return base, best


def scores(job: JobSummary) -> str:
    """Held-out score of the base and the best so far."""
    base, best = held_out(job)
    if best is None:
        return ""
    return f"held out {number(best)}" if base is None else f"held out {number(base)} → {number(best)}"


def cost_text(job: JobSummary) -> str:
    """The dollars for its GPU-hours; empty if they have no price."""
    return "" if job.cost is None else f"{show_dollars(job.cost)} for {job.gpu_hours:.2f} GPU-hours"


def gain_text(base: float | None, best: float | None, *, lower_is_better: bool | None) -> str:
    """The gain over the base, in percent."""
    if base is None or best is None or abs(base) < 1e-12:
        return ""
    gain = (base - best if lower_is_better is not False else best - base) / abs(base)
    return f"{percent(abs(gain), 1)} {'better' if gain >= 0 else 'worse'} than the base"


def shown_target(job: JobDetails) -> str:
    """The profile's target, and whether the attempt with the result, else the newest, reached it."""
    number_of_best = job.result.attempt if job.result else None
    chosen = [attempt for attempt in job.attempts if attempt.number == number_of_best] or job.attempts[-1:]
    return f"target {chosen[0].target}" if chosen and chosen[0].target else ""


def deadline_text(job: JobSummary) -> tuple[str, Tone]:
    """The time that is left; a warning where the job will not be over by then."""
    left = job.deadline_at - time.time()
    if left < 0:
        return f"deadline was {clock(job.deadline_at)}", "bad"
    ends_at = job.live.ends_at if job.live else None
    late = ends_at is not None and ends_at > job.deadline_at
    return f"{duration(left)} to deadline", "warn" if late else "muted"


def gpu_names(fleet: FleetStatus) -> dict[str, str]:
    """The GPUs' numbers by id; of a node its id."""
    return {gpu.id: gpu_name(gpu) for gpu in fleet.gpus}


def subject_text(subject: str) -> str:
    """Shorten the subject of an alert: the id of a validator or GPU is longer than what distinguishes it."""
    return subject if len(subject) <= 24 else f"{subject[:23]}…"


def severity_tone(severity: Severity) -> Tone:
    return _SEVERITIES[severity]


def answer_text(offer: OfferSummary | ChangedAnswer) -> tuple[str, Tone]:
    return ("accepted", "good") if offer.accepted else ("refused", "muted")
