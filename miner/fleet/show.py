"""The fleet for people and machines: cards, who has them until when, who waits."""

from __future__ import annotations

from typing import Any

from core.units import show_bytes
from miner.fleet.base import Gpu, TaskKey
from miner.fleet.claims import Claim, Stage
from miner.fleet.inventory import Inventory
from miner.fleet.local import LocalFleet, Stock
from miner.store.offers import Taken


def fleet_page(fleet: LocalFleet, inventory: Inventory, now: float) -> dict[str, Any]:
    """The running daemon's."""
    queue = {claim.key: place for place, claim in enumerate(fleet.queue(), 1)}
    claims = sorted(
        fleet.ledger.claims, key=lambda claim: (_ORDER[claim.stage], claim.starts_at, claim.since)
    )
    return {
        "at": now,
        "source": inventory.source_name,
        "looked_at": inventory.looked_at,
        "trouble": fleet.stock.trouble,
        "cards": [_card(gpu, fleet.stock, fleet.ledger.running_on(gpu.id)) for gpu in fleet.stock.gpus],
        "claims": [_claim(claim, queue.get(claim.key)) for claim in claims],
    }


def books_page(stock: Stock, source: str, taken: list[Taken], now: float) -> dict[str, Any]:
    """Without a daemon: the cards as they are, and what is promised according to the books."""
    return {
        "at": now,
        "source": source,
        "looked_at": now,
        "trouble": stock.trouble,
        "cards": [_card(gpu, stock, None) for gpu in stock.gpus],
        "claims": [
            {
                "validator": place.hold.key.validator,
                "task_id": place.hold.key.task_id,
                "stage": Stage.PROMISED.value,
                "kind": place.hold.kind.value,
                "gpus": list(place.hold.gpus),
                "starts_at": place.hold.starts_at,
                "ends_at": place.hold.ends_at,
                "priority": place.hold.priority,
                "accepted": place.firm,
                "queue": None,
            }
            for place, _ in taken
        ],
    }


_ORDER = {Stage.RUNNING: 0, Stage.PROMISED: 1, Stage.WAITING: 2}


def _card(gpu: Gpu, stock: Stock, key: TaskKey | None) -> dict[str, Any]:
    return {
        "id": gpu.id,
        "index": gpu.index,
        "kind": gpu.kind.name,
        "memory": show_bytes(gpu.kind.memory_bytes),
        "linked": sorted(other.index for other in stock.gpus if other.id in gpu.linked),
        "out": gpu.out,
        "unclean": gpu.id in stock.unclean,
        "shared": gpu.id in stock.shared,
        "task_id": key and key.task_id,
        "validator": key and key.validator,
    }


def _claim(claim: Claim, place: int | None) -> dict[str, Any]:
    return {
        "validator": claim.key.validator,
        "task_id": claim.key.task_id,
        "stage": claim.stage.value,
        "kind": claim.kind.value,
        "gpus": list(claim.gpus),
        "starts_at": claim.starts_at,
        "ends_at": claim.until,
        "priority": claim.priority,
        "accepted": claim.firm,
        "queue": place,
    }
