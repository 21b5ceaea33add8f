"""Describe the fleet for the operator's page and command: GPUs, who has them, and who waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core.domain.keys import GpuReservation, TaskKey
from core.domain.units import show_bytes
from miner.api.fleet import FleetClaim, FleetGpu, FleetStatus
from miner.api.samples import GpuSample
from miner.fleet.base import Gpu, InventoryState
from miner.fleet.fleet import Fleet
from miner.fleet.inventory import GpuInventory
from miner.fleet.node_view import node_entries, windows
from miner.fleet.sampler import FRESH_SECONDS, SampleHistory
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
) -> FleetStatus:
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
    first, host = _first_by_gpu(claims), samples.host
    return FleetStatus(
        at=now,
        source=inventory.source_name,
        looked_at=inventory.scanned_at,
        trouble=state.problem,
        notes=list(state.notes),
        nodes=node_entries(state, running, now),
        gpus=[
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
        claims=claims,
        host=host if host and host.at >= now - FRESH_SECONDS else None,
    )


def view_without_daemon(
    inventory: InventoryState,
    source: str,
    samples: Iterable[GpuSample],
    reservations: list[OpenReservation],
    names: Mapping[TaskKey, TaskName],
    now: float,
) -> FleetStatus:
    """The GPUs as they are, and the reservations in the store."""
    claims = [
        _claim_entry(row.hold, ClaimStage.RESERVED, row.firm, None, names)
        for row, _ in sorted(reservations, key=lambda one: one.reservation.hold.starts_at)
    ]
    first, measured = _first_by_gpu(claims), {sample.gpu: sample for sample in samples}
    indices = {gpu.id: gpu.index for gpu in inventory.gpus}
    return FleetStatus(
        at=now,
        source=source,
        looked_at=now,
        trouble=inventory.problem,
        notes=list(inventory.notes),
        nodes=node_entries(inventory, (), now),
        gpus=[
            _gpu_entry(gpu, indices, inventory, first.get(gpu.id), measured.get(gpu.id), now)
            for gpu in inventory.gpus
        ],
        claims=claims,
    )


_STAGE_ORDER = {ClaimStage.RUNNING: 0, ClaimStage.RESERVED: 1, ClaimStage.WAITING: 2}


def _gpu_entry(
    gpu: Gpu,
    indices: Mapping[str, int],
    inventory: InventoryState,
    claim: FleetClaim | None,
    sample: GpuSample | None,
    now: float,
) -> FleetGpu:
    holder = claim if claim and claim.stage == ClaimStage.RUNNING else None
    return FleetGpu(
        id=gpu.id,
        index=gpu.index,
        node=gpu.node,
        others=gpu.busy_until(now) is not None,
        busy=windows(gpu, now),
        kind=gpu.kind.name,
        memory=show_bytes(gpu.kind.memory_bytes),
        linked=sorted(indices[other] for other in gpu.linked if other in indices),
        out=gpu.unusable_reason,
        unclean=gpu.id in inventory.unclean,
        shared=gpu.id in inventory.shared,
        task_id=holder and holder.task_id,
        validator=holder and holder.validator,
        job_id=holder and holder.job_id,
        until=holder and holder.ends_at,
        claim=claim,
        sample=sample,
    )


def _first_by_gpu(claims: Sequence[FleetClaim]) -> dict[str, FleetClaim]:
    return {gpu: claim for claim in reversed(claims) for gpu in claim.gpus}


def _as_planned(claim: GpuClaim) -> GpuReservation:
    return GpuReservation(claim.key, claim.kind, claim.gpus, claim.starts_at, claim.until, claim.priority)


def _claim_entry(
    hold: GpuReservation,
    stage: ClaimStage,
    accepted: bool,
    place: int | None,
    names: Mapping[TaskKey, TaskName],
) -> FleetClaim:
    name = names.get(hold.key)
    return FleetClaim(
        job_id=name and name.job_id,
        model=name and name.model,
        validator=hold.key.validator,
        task_id=hold.key.task_id,
        stage=stage.value,
        kind=hold.kind,
        gpus=list(hold.gpus),
        starts_at=hold.starts_at,
        ends_at=hold.ends_at,
        priority=hold.priority,
        accepted=accepted,
        queue=place,
    )
