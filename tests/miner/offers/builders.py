"""Offers, fleets and policies for tests, each in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.domain.decisions import Decision, Reason
from core.domain.hardware import Hardware, parse_gpus
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from core.models.facts import Family
from core.profile.resolve import LoadedProfile, load_profile
from miner.fleet.base import FleetSnapshot
from miner.offers.backtest.replay import idle_fleet
from miner.offers.decide import decide
from miner.offers.history import JobOutcome, SuccessHistory
from miner.offers.policies.load import LoadedPolicy, load_policy
from tests.core.planning.candidates import on_all_gpus

#: Wednesday, 2025-10-01, 12:00 UTC.
NOON = 1_759_320_000.0
HOUR = 3600.0


def offer(**changes: Any) -> MinerTaskOffer:
    """Three hours of instruction tuning of Llama 3.1 8B."""
    whole: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "hours_to_complete": 3.0,
        "task_id": "task-1",
        "task_type": TaskType.INSTRUCT,
        "ds_size": 100_000,
        "model_params_count": 8_030_261_248,
    }
    return MinerTaskOffer(**{**whole, **changes})


def picture_offer(**changes: Any) -> MinerTaskOffer:
    whole: dict[str, Any] = {
        "model": "rayonlabs/FLUX.1-dev",
        "hours_to_complete": 1.0,
        "task_type": TaskType.IMAGE,
        "ds_size": 20,
        "model_params_count": None,
    }
    return offer(**{**whole, **changes})


def fleet(gpus: str = "4xH100", *holds: GpuReservation, **changes: Any) -> FleetSnapshot:
    idle = idle_fleet(Hardware(gpus=parse_gpus(gpus)))
    whole: dict[str, Any] = {"inventory": idle.inventory, "reservations": tuple(holds), "taken_at": NOON}
    return FleetSnapshot(**{**whole, **changes})


def hold(task: str, gpus: str, start: float = -1.0, end: float = 2.0) -> GpuReservation:
    """From and until in hours from noon; `gpus` is one digit each."""
    return GpuReservation(
        TaskKey("validator", task),
        ReservationKind.JOB,
        tuple(gpus),
        NOON + start * HOUR,
        NOON + end * HOUR,
        0.3,
    )


def policy(name: str = "everything-feasible", **overrides: Any) -> LoadedPolicy:
    """`policy(rules__max_jobs=3)`."""
    return load_policy(name, (), {key.replace("__", "."): value for key, value in overrides.items()})


def written_policy(folder: Path, text: str) -> LoadedPolicy:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return load_policy(str(file))


def profile(name: str = "h100x4-strategy") -> LoadedProfile:
    """`all`: h100x4 with every job on all GPUs."""
    return on_all_gpus() if name == "all" else load_profile(name)


def decided(
    asked: MinerTaskOffer | None = None,
    by: LoadedPolicy | None = None,
    on: FleetSnapshot | None = None,
    *,
    history: SuccessHistory | None = None,
    plan_by: str = "h100x4-strategy",
    now: float = NOON,
) -> Decision:
    return decide(
        asked or offer(), now, on or fleet(), history or SuccessHistory(), by or policy(), profile(plan_by)
    )


def verdict(decision: Decision, rule: str) -> Reason:
    (verdict,) = (reason for reason in decision.reasons if reason.rule == rule)
    return verdict


def outcome(job_id: int = 1, **changes: Any) -> JobOutcome:
    whole: dict[str, Any] = {
        "job_id": job_id,
        "task_type": TaskType.INSTRUCT,
        "kind": "instruct",
        "family": Family.LLAMA,
        "params": 8_030_261_248,
        "published": True,
        "ended_at": NOON,
    }
    return JobOutcome(**{**whole, **changes})
