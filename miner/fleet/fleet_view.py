"""Describe the fleet as JSON, for the operator's page and command: GPUs, who has them, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from miner.store.offers import OpenReservation


def fleet_view(
    fleet: Fleet,
    inventory: GpuInventory,
    samples: SampleHistory,
    job_ids: Mapping[TaskKey, int],
    now: float,
    *,
    is_short: bool = False,
) -> dict[str, Any]:
    """The fleet of the running daemon. `job_ids`: of the tasks that run; `is_short`: without the GPUs of
    nodes that no task of ours has, of which there may be thousands."""
    state = fleet.inventory
    running = {gpu: claim for claim in fleet.ledger.claims if claim.is_running for gpu in claim.gpus}
    queue = {claim.key: place for place, claim in enumerate(fleet.queue(), 1)}
    claimed = {gpu for claim in fleet.ledger.claims for gpu in claim.gpus}
    indices = {gpu.id: gpu.index for gpu in state.gpus}
    claims = sorted(
        fleet.ledger.claims, key=lambda claim: (_STAGE_ORDER[claim.stage], claim.starts_at, claim.since)
    )
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
                running.get(gpu.id),
                job_ids,
                samples.latest(gpu.id, since=now - FRESH_SECONDS),
                now,
            )
            for gpu in state.gpus
            if not (is_short and gpu.node) or gpu.id in claimed
        ],
        "claims": [
            _claim_entry(_as_planned(claim), claim.stage, claim.firm, queue.get(claim.key))
            for claim in claims
        ],
    }


def view_without_daemon(
    inventory: InventoryState,
    source: str,
    samples: Iterable[GpuSample],
    reservations: list[OpenReservation],
    now: float,
) -> dict[str, Any]:
    """The GPUs as they are, and the reservations in the store."""
    by_gpu = {sample.gpu: sample for sample in samples}
    indices = {gpu.id: gpu.index for gpu in inventory.gpus}
    return {
        "at": now,
        "source": source,
        "looked_at": now,
        "trouble": inventory.problem,
        "notes": list(inventory.notes),
        "nodes": node_entries(inventory, (), now),
        "gpus": [
            _gpu_entry(gpu, indices, inventory, None, {}, by_gpu.get(gpu.id), now) for gpu in inventory.gpus
        ],
        "claims": [_claim_entry(row.hold, ClaimStage.RESERVED, row.firm, None) for row, _ in reservations],
    }


_STAGE_ORDER = {ClaimStage.RUNNING: 0, ClaimStage.RESERVED: 1, ClaimStage.WAITING: 2}


def _gpu_entry(
    gpu: Gpu,
    indices: Mapping[str, int],
    inventory: InventoryState,
    holder: GpuClaim | None,
    job_ids: Mapping[TaskKey, int],
    sample: GpuSample | None,
    now: float,
) -> dict[str, Any]:
    key = holder and holder.key
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
        "task_id": key and key.task_id,
        "validator": key and key.validator,
        "job_id": key and job_ids.get(key),
        "until": holder and holder.until,
        "sample": sample and {**asdict(sample), "memory_share": sample.memory_share},
    }


def _as_planned(claim: GpuClaim) -> GpuReservation:
    return GpuReservation(claim.key, claim.kind, claim.gpus, claim.starts_at, claim.until, claim.priority)


def _claim_entry(
    hold: GpuReservation, stage: ClaimStage, accepted: bool, place: int | None
) -> dict[str, Any]:
    return {
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
