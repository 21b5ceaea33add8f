"""The fleet: the GPUs of the inventory, the ledger of who has them, and the jobs that wait for a grant."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from core.domain.hardware import PCIE_BANDWIDTH, GpuLink, GpuSet
from core.domain.keys import GpuReservation, NamedLane, Placement, TaskKey, node_of, nodes_of
from miner.fleet.base import (
    BackendAbility,
    FleetSnapshot,
    GpuGrant,
    GpuLostListener,
    GpuOption,
    InventoryState,
    joint_ability,
)
from miner.fleet.ledger import GpuLedger
from miner.fleet.placement import topology_of
from miner.fleet.schedule import GpuClaim, QueueRules

log = logging.getLogger(__name__)


class Fleet:
    """The GPUs that the inventory finds, and who has them. For one event loop; only `acquire` waits."""

    def __init__(
        self,
        inventory: InventoryState | None = None,
        *,
        rules: QueueRules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = GpuLedger(rules)
        self.inventory = InventoryState()
        #: By backend, as nodes name it. Set by the jobs' side, which knows the backends, for decisions about
        #: offers; replaced whenever one changes.
        self.abilities: Mapping[str, BackendAbility] = {}
        #: Time at which a GPU was last released: memory in use soon after is the last job's.
        self.released_at: dict[str, float] = {}
        self.clock = clock
        self._waiting: dict[TaskKey, asyncio.Future[GpuGrant]] = {}
        self._listeners: list[GpuLostListener] = []
        self._on_release: list[Callable[[], None]] = []
        self._notified: set[tuple[TaskKey, str]] = set()
        #: GPUs of runs from before a restart that were not scanned yet, and the time until which to wait.
        self._unseen: dict[TaskKey, tuple[tuple[str, ...], float]] = {}
        if inventory is not None:
            self.update(inventory)

    def update(self, inventory: InventoryState) -> None:
        """Take over a scan's result. Where nothing has changed the old object is kept, which is quickly
        compared."""
        inventory = self.inventory if inventory == self.inventory else inventory
        self.inventory = inventory
        self.ledger.set_gpus(
            inventory.gpus, failed=inventory.failed, unclean=inventory.unclean, shared=inventory.shared
        )
        if inventory.gpus:
            for unseen, (ids, until) in self._unseen.items():
                self.ledger.adopt(unseen, ids, now=self.clock(), until=until)
            self._unseen.clear()
        self.schedule()
        self._notified = {entry for entry in self._notified if entry[1] in inventory.failed}
        for gpu, why in inventory.failed.items():
            key = self.ledger.running_on(gpu)
            if key is not None and (key, gpu) not in self._notified:
                self._notified.add((key, gpu))
                self._notify_lost(key, gpu, why)

    def snapshot(self, now: float, without: TaskKey | None = None) -> FleetSnapshot:
        """The fleet as it is now; `without` what this task holds. The tuple of the reservations is the same
        object for as long as nothing in it has changed."""
        inventory, reservations = self.inventory, self.ledger.reservations
        if any(reservation.key == without for reservation in reservations):
            reservations = tuple(entry for entry in reservations if entry.key != without)
        return FleetSnapshot(inventory, reservations, now, self.abilities)

    def on_lost(self, listener: GpuLostListener) -> None:
        """Call `listener(key, gpu id, why)` when a GPU that a job has fails or vanishes."""
        self._listeners.append(listener)

    def on_release(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when a job has released GPUs that should be scanned."""
        self._on_release.append(listener)

    def is_in_use(self, gpu: str) -> bool:
        return self.ledger.running_on(gpu) is not None

    def reserve(
        self,
        key: TaskKey,
        placement: Placement,
        *,
        priority: float = 0.0,
        lane: NamedLane | None = None,
    ) -> bool:
        """Keep a placement's GPUs for an offer; return False if they are not free. Synchronous, so that a
        decision made on a snapshot of the same instant holds."""
        now = self.clock()
        others = self.inventory.nodes_like(placement.gpus)
        return self.ledger.reserve(key, placement, now=now, priority=priority, lane=lane, others=others)

    def renew(self, key: TaskKey, now: float) -> None:
        """Extend the reservation of an offer that came again: it counts from now on."""
        self.ledger.renew(key, now)

    def restore(self, reservations: Iterable[tuple[GpuReservation, bool]]) -> None:
        """Restore reservations from before a restart, each with True if it was an accepted offer's."""
        for reservation, firm in reservations:
            others = self.inventory.nodes_like(reservation.gpus)
            self.ledger.restore(reservation, firm=firm, now=self.clock(), others=others)
        self.schedule()

    def start(self, key: TaskKey, *, until: float, priority: float = 0.0) -> None:
        """Make the task a job: with the GPUs reserved for it, or in the queue. Its place in the queue is
        found by the next `schedule`: no GPUs can be requested before, and many starts may come at once."""
        self.ledger.start(key, now=self.clock(), until=until, priority=priority)

    async def acquire(
        self,
        key: TaskKey,
        options: Sequence[GpuOption],
        *,
        until: float,
        exclusive: bool = False,
        lane: NamedLane | None = None,
        needs: float = 0.0,
    ) -> GpuGrant:
        """Wait in the queue (by priority, ageing so that nobody starves) for the GPUs of the first of
        `options` that can be had now. Cancelling the wait leaves the queue; what was reserved for the task
        stays reserved until `release`. A job whose run has ended may call this again without `release`, for
        more, fewer or other GPUs. `until`: it is over by then at the latest; a reservation's window stays as
        long as was planned.
        `exclusive`: only GPUs that nobody else uses even a little; `needs`: seconds that it takes; 0: not
        known."""
        earlier = self._waiting.pop(key, None)
        if earlier is not None:
            earlier.cancel()
        future: asyncio.Future[GpuGrant] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self.ledger.request(
            key, options, now=self.clock(), until=until, exclusive=exclusive, lane=lane, needs=needs
        )
        self.schedule()
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.get(key, future) is future:  # else it was called again for the same task
                self._waiting.pop(key, None)
                self.ledger.leave(key)
                self.schedule()
            raise

    def yield_gpus(self, key: TaskKey) -> bool:
        """Lend its GPUs to other jobs until it acquires some: its inputs are not arriving. Return False if it
        had yielded them already, or has none."""
        changed = self.ledger.yield_gpus(key)
        if changed:
            self.schedule()
        return changed

    def blocking_reservations(self, key: TaskKey) -> list[GpuReservation]:
        """Return the reservations that a waiting job waits for: those before it of the GPUs it is to get."""
        return self.ledger.blocking_reservations(key)

    def adopt(self, key: TaskKey, ids: Sequence[str], *, until: float) -> GpuGrant | None:
        """Take over the GPUs of a run that survived a restart. Return None if one of them is gone, and before
        the first scan, which takes them over before any other job can get them."""
        if not self.inventory.gpus:
            self._unseen[key] = tuple(ids), until
            return None
        before = self.ledger.claim(key)
        had = before.gpus if before else ()
        if not self.ledger.adopt(key, ids, now=self.clock(), until=until):
            return None
        # A pass over a large fleet takes milliseconds, and a restart adopts a thousand runs.
        if had not in ((), tuple(ids)) or self.ledger.displaces(key):
            self.schedule()
        return self._grant(key, tuple(ids))

    def extend(self, key: TaskKey, until: float) -> float:
        """Keep its GPUs until then, or until one of them is reserved for somebody else or others use it, and
        never shorter than so far. Returns until when it has them now."""
        kept = self.ledger.extend(key, until, self.clock())
        if self.ledger.displaces(key):
            self.schedule()
        return kept

    def free_until(self, gpus: Collection[str]) -> float:
        """Return when others begin to use one of these GPUs, as far as the cluster's scheduler knows."""
        return self.ledger.free_until(gpus, self.clock())

    def release(self, key: TaskKey) -> None:
        """Take the task's GPUs back, and end its wait. Safe to repeat."""
        self._unseen.pop(key, None)
        claim = self.ledger.claim(key)
        if claim is None:
            return
        measured = {node.name for node in self.inventory.nodes if node.sees_memory}
        used = [gpu for gpu in claim.gpus if node_of(gpu) in measured] if claim.is_running else []
        if used:
            # Its processes may take a while to end: the next job gets the GPUs when a scan finds them empty.
            self.ledger.unclean.update(used)
            self.released_at.update(dict.fromkeys(used, self.clock()))
            for listener in self._on_release:
                listener()
        self.ledger.release(key)
        self._notified = {entry for entry in self._notified if entry[0] != key}
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.cancel()
        self.schedule()

    def schedule(self) -> None:
        """Grant GPUs to every job whose turn it is: after every change, and regularly because time passes.
        Before the first scan nothing is done: restored reservations would lose their GPUs for no reason."""
        if not self.inventory.gpus:
            return
        for claim in self.ledger.schedule(self.clock()):
            future = self._waiting.pop(claim.key, None)
            if future is None or future.done():
                self.ledger.leave(claim.key)
            else:
                future.set_result(self._grant(claim.key, claim.gpus))
                log.info("GPUs %s to %s", ", ".join(claim.gpus), claim.key.task_id)

    @property
    def ability(self) -> BackendAbility:
        """The combined ability of all backends."""
        return joint_ability(self.abilities)

    @property
    def usable_count(self) -> int:
        return sum(gpu.unusable_reason is None for gpu in self.inventory.gpus)

    def queue(self) -> list[GpuClaim]:
        return self.ledger.queue(self.clock())

    def _grant(self, key: TaskKey, ids: tuple[str, ...]) -> GpuGrant:
        kinds = {gpu.id: gpu.kind for gpu in self.inventory.gpus}
        kind = min((kinds[name] for name in ids), key=lambda kind: kind.memory_bytes)
        if not self._are_linked(ids):
            slower = min(kind.link_bandwidth, PCIE_BANDWIDTH)
            kind = kind.model_copy(update={"link": GpuLink.PCIE, "link_bandwidth": slower})
        return GpuGrant(key, ids, GpuSet(kind=kind, count=len(ids), nodes=len(nodes_of(ids))))

    def _are_linked(self, ids: Sequence[str]) -> bool:
        """Return True if all of these GPUs that share a node are linked."""
        return all(
            len(within) < 2 or topology_of(node.every).are_all_linked(within)
            for node in self.inventory.gpus_by_node
            if (within := [gpu.id for gpu in node.every if gpu.id in ids])
        )

    def _notify_lost(self, key: TaskKey, gpu: str, why: str) -> None:
        for listener in self._listeners:
            try:
                listener(key, gpu, why)
            except Exception:  # one listener's mistake must not keep the others from being notified
                log.exception("notifying %s of the loss of GPU %s failed", key.task_id, gpu)
