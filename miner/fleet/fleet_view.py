"""Describe the fleet as JSON, for the operator's page and command: GPUs, who has them, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from core.domain.keys import GpuReservation, TaskKey
from core.domain.units import show_bytes
from miner.fleet.base import Gpu, InventoryState
from miner.fleet.fleet import Fleet
from miner.fleet.inventory import GpuInventory
from miner.fleet.node_view import node_entries, windows
from miner.fleet.samples import FRESH_SECONDS, GpuSample, SampleHistory
from miner.fleet.schedule import ClaimStage, GpuClaim
from miner.store.offers import OpenReservation, TaskName


def fleet_view(
    fleet: Fleet,
    inventory: GpuInventory,
    samples: SampleHistory,
    names: Mapping[TaskKey, TaskName],
    now: float,
    *,
    is_short: bool = False,
) -> dict[str, Any]:
    """The fleet of the running daemon. `names` are those of the tasks that claim GPUs; `is_short` leaves out
    the GPUs of nodes without our tasks, of which there may be thousands."""
    state = fleet.inventory
    running = {gpu: claim for claim in fleet.ledger.claims if claim.is_running for gpu in claim.gpus}
    queue = {claim.key: place for place, claim in enumerate(fleet.queue(), 1)}
    indices = {gpu.id: gpu.index for gpu in state.gpus}
    claims = [
        _claim_entry(_as_planned(claim), claim.stage, claim.firm, queue.get(claim.key), names)
        for claim in sorted(
            fleet.ledger.claims, key=lambda claim: (_STAGE_ORDER[claim.stage], claim.starts_at, claim.since)
        )
    ]
    first = _first_by_gpu(claims)
    return {
        "at": now,
        "source": inventory.source_name,
        "looked_at": inventory.scanned_at,
        "trouble": state.problem,
        "notes": list(state.notes),
        "nodes": node_entries(state, running, now),
        "gpus": [
            _gpu_entry(
                gpu,
                indices,
                state,
                first.get(gpu.id),
                samples.latest(gpu.id, since=now - FRESH_SECONDS),
                now,
            )
            for gpu in state.gpus
            if not (is_short and gpu.node) or gpu.id in first
        ],
        "claims": claims,
    }


def view_without_daemon(
    inventory: InventoryState,
    source: str,
    samples: Iterable[GpuSample],
    reservations: list[OpenReservation],
    names: Mapping[TaskKey, TaskName],
    now: float,
) -> dict[str, Any]:
    """The GPUs as they are, and the reservations in the store."""
    claims = [
        _claim_entry(row.hold, ClaimStage.RESERVED, row.firm, None, names)
        for row, _ in sorted(reservations, key=lambda one: one.reservation.hold.starts_at)
    ]
    first, measured = _first_by_gpu(claims), {sample.gpu: sample for sample in samples}
    indices = {gpu.id: gpu.index for gpu in inventory.gpus}
    return {
        "at": now,
        "source": source,
        "looked_at": now,
        "trouble": inventory.problem,
        "notes": list(inventory.notes),
        "nodes": node_entries(inventory, (), now),
        "gpus": [
            _gpu_entry(gpu, indices, inventory, first.get(gpu.id), measured.get(gpu.id), now)
            for gpu in inventory.gpus
        ],
        "claims": claims,
    }


_STAGE_ORDER = {ClaimStage.RUNNING: 0, ClaimStage.RESERVED: 1, ClaimStage.WAITING: 2}


def _gpu_entry(
    gpu: Gpu,
    indices: Mapping[str, int],
    inventory: InventoryState,
    claim: Mapping[str, Any] | None,
    sample: GpuSample | None,
    now: float,
) -> dict[str, Any]:
    holder = claim if claim and claim["stage"] == ClaimStage.RUNNING else None
    return {
        "id": gpu.id,
        "index": gpu.index,
        "node": gpu.node,
        "others": gpu.busy_until(now) is not None,
        "busy": windows(gpu, now),
        "kind": gpu.kind.name,
        "memory": show_bytes(gpu.kind.memory_bytes),
        "linked": sorted(indices[other] for other in gpu.linked if other in indices),
        "out": gpu.unusable_reason,
        "unclean": gpu.id in inventory.unclean,
        "shared": gpu.id in inventory.shared,
        "task_id": holder and holder["task_id"],
        "validator": holder and holder["validator"],
        "job_id": holder and holder["job_id"],
        "until": holder and holder["ends_at"],
        #: The claim that runs on it, else its next reservation.
        "claim": claim,
        "sample": sample and {**asdict(sample), "memory_share": sample.memory_share},
    }


def _first_by_gpu(claims: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {gpu: claim for claim in reversed(claims) for gpu in claim["gpus"]}


def _as_planned(claim: GpuClaim) -> GpuReservation:
    return GpuReservation(claim.key, claim.kind, claim.gpus, claim.starts_at, claim.until, claim.priority)


def _claim_entry(
    hold: GpuReservation,
    stage: ClaimStage,
    accepted: bool,
    place: int | None,
    names: Mapping[TaskKey, TaskName],
) -> dict[str, Any]:
    name = names.get(hold.key)
    return {
        "job_id": name and name.job_id,
        "model": name and name.model,
        "validator": hold.key.validator,
        "task_id": hold.key.task_id,
        "stage": stage.value,
        "kind": hold.kind.value,
        "gpus": list(hold.gpus),
        "starts_at": hold.starts_at,
        "ends_at": hold.ends_at,
        "priority": hold.priority,
        "accepted": accepted,
        "queue": place,
    }
