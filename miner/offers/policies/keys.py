"""The keys of policies: what the strategies call them, and where a stray one belongs."""

from __future__ import annotations

from core.layers.nearest import Keys
from miner.offers.policies.schema import Policy

SYNONYMS: dict[str, str] = {
    "task_types": "tasks",
    "types": "tasks",
    "model_families": "families",
    "family_allowed": "families",
    "deny": "models_denied",
    "denied": "models_denied",
    "blocked_models": "models_denied",
    "hours_by_task": "hours",
    "max_duration": "max_hours",
    "duration": "max_hours",
    "capacity": "max_jobs",
    "max_concurrent_jobs": "max_jobs",
    "concurrent_jobs": "max_jobs",
    "quiet_hours": "blackout",
    "min_history": "experience",
    "threshold_score": "threshold",
    "min_score": "threshold",
    "task_weight": "task",
    "model_performance": "family",
    "task_success_rate": "success",
    "time_efficiency": "time",
    "size_efficiency": "size",
    "h100x8_bonus": "hardware",
    "decay": "half_life",
    "max_queue": "max_wait",
}

PARTS = ("rules", "fitting", "score", "success", "value")
KEYS = Keys(Policy, SYNONYMS, [(), *((part,) for part in PARTS), ("score", "weights")])
