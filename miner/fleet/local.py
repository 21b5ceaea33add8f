"""The fleet of this host: the ledger, and those who wait in front of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.hardware import PCIE_BANDWIDTH, GpuSet, Hardware, Link
from miner.fleet.base import Ability, FleetSnapshot, Gpu, Grant, Hold, Lost, NamedLane, Placement, TaskKey
from miner.fleet.claims import Claim
from miner.fleet.layout import layout_of
from miner.fleet.ledger import Ledger
from miner.fleet.schedule import Rules

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stock:
    """What the inventory knows: every card, those that are out with their reason."""

    gpus: tuple[Gpu, ...] = ()
    #: The host around the usable cards; None where there is none.
    hardware: Hardware | None = None
    #: Card → what happened to it, for cards that no job can go on with.
    failed: Mapping[str, str] = field(default_factory=dict)
    #: They hold memory that their last job has not given back yet.
    unclean: frozenset[str] = frozenset()
    #: Used a little by somebody else.
    shared: frozenset[str] = frozenset()
    #: Why the inventory could not be read this time.
    trouble: str | None = None
    #: The same with all cards, also those that are out for the moment.
    installed: Hardware | None = None
    #: Whether memory in use is seen: if not, a released card counts as clean.
    sees_memory: bool = False


class LocalFleet:
    """Implements `miner.fleet.base.Fleet`. For one event loop; nothing here waits but `acquire`."""

    def __init__(
        self,
        stock: Stock | None = None,
        *,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = Ledger(rules)
        self.stock = Stock()
        self.ability = Ability()
        #: When a card was last given back, for those who judge what is still on it.
        self.released_at: dict[str, float] = {}
        self._clock = clock
        self._waiting: dict[TaskKey, asyncio.Future[Grant]] = {}
        self._listeners: list[Lost] = []
        self._on_release: list[Callable[[], None]] = []
        self._told: set[tuple[TaskKey, str]] = set()
        if stock is not None:
            self.update(stock)

    # What there is

    def update(self, stock: Stock) -> None:
        """The inventory has looked again. Where nothing has changed, what was is kept: those who compare see
        that it is the same."""
        stock = self.stock if stock == self.stock else stock
        self.stock = stock
        self.ledger.set_cards(stock.gpus, failed=stock.failed, unclean=stock.unclean, shared=stock.shared)
        self.arrange()
        self._told = {entry for entry in self._told if entry[1] in stock.failed}
        for gpu, why in stock.failed.items():
            key = self.ledger.running_on(gpu)
            if key is not None and (key, gpu) not in self._told:
                self._told.add((key, gpu))
                self._tell(key, gpu, why)

    def snapshot(self, now: float) -> FleetSnapshot:
        stock = self.stock
        return FleetSnapshot(stock.gpus, self.ledger.holds, stock.hardware, now, stock.trouble, self.ability)

    def could_have(self, key: TaskKey) -> Hardware | None:
        return self.stock.hardware

    def on_lost(self, told: Lost) -> None:
        self._listeners.append(told)

    def on_release(self, told: Callable[[], None]) -> None:
        """Call `told()` when a job has given cards back that somebody should look at."""
        self._on_release.append(told)

    def is_in_use(self, gpu: str) -> bool:
        return self.ledger.running_on(gpu) is not None

    # Promises

    def promise(
        self,
        key: TaskKey,
        placement: Placement,
        *,
        until: float,
        priority: float = 0.0,
        lane: NamedLane | None = None,
    ) -> bool:
        """Keep a placement's GPUs for an offer until `until`; False: they are not free. At once, so that
        whoever decided on a snapshot of the same instant is right."""
        now = self._clock()
        return self.ledger.promise(key, placement, now=now, until=until, priority=priority, lane=lane)

    def renew(self, key: TaskKey, now: float) -> None:
        """The offer was made once more, and what was promised is promised from now on."""
        self.ledger.renew(key, now)

    def restore(self, holds: Iterable[tuple[Hold, bool]]) -> None:
        """Take up the promises of an earlier life, each with whether it was an accepted offer's."""
        for hold, firm in holds:
            self.ledger.restore(hold, firm=firm, now=self._clock())
        self.arrange()

    def start(self, key: TaskKey, *, until: float, priority: float = 0.0) -> None:
        """The task is a job now: with the GPUs promised to it, or in the queue. Where in the queue, the next
        `arrange` says: nobody can ask for GPUs before then, and starts come in storms."""
        self.ledger.start(key, now=self._clock(), until=until, priority=priority)

    # GPUs

    async def acquire(
        self,
        key: TaskKey,
        counts: Sequence[int],
        *,
        until: float,
        priority: float,
        exclusive: bool = False,
        lane: NamedLane | None = None,
    ) -> Grant:
        earlier = self._waiting.pop(key, None)
        if earlier is not None:
            earlier.cancel()
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        self.ledger.ask(
            key, counts, now=self._clock(), until=until, priority=priority, exclusive=exclusive, lane=lane
        )
        self.arrange()
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.get(key, future) is future:  # else somebody asks for the same task again
                self._waiting.pop(key, None)
                self.ledger.leave(key)
                self.arrange()
            raise

    def step_aside(self, key: TaskKey) -> bool:
        changed = self.ledger.step_aside(key)
        if changed:
            self.arrange()
        return changed

    def in_the_way(self, key: TaskKey) -> list[Hold]:
        return self.ledger.in_the_way(key)

    def adopt(self, key: TaskKey, ids: Sequence[str], *, until: float) -> Grant | None:
        if not self.ledger.adopt(key, ids, now=self._clock(), until=until):
            return None
        self.arrange()
        return self._grant(key, tuple(ids))

    def extend(self, key: TaskKey, until: float) -> float:
        kept = self.ledger.extend(key, until)
        self.arrange()
        return kept

    def release(self, key: TaskKey) -> None:
        claim = self.ledger.claim(key)
        if claim is None:
            return
        if claim.is_running and self.stock.sees_memory:
            # Its processes may take a while to end: the next job gets the cards when a look finds them empty.
            self.ledger.unclean.update(claim.gpus)
            self.released_at.update(dict.fromkeys(claim.gpus, self._clock()))
            for told in self._on_release:
                told()
        self.ledger.release(key)
        self._told = {entry for entry in self._told if entry[0] != key}
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.cancel()
        self.arrange()

    def arrange(self) -> None:
        """See whether anybody's turn has come: after every change, and now and then because time passes. What
        was promised in an earlier life waits for the first look, or it would lose its cards to no purpose."""
        if not self.stock.gpus:
            return
        for claim in self.ledger.arrange(self._clock()):
            future = self._waiting.pop(claim.key, None)
            if future is None or future.done():
                self.ledger.leave(claim.key)
            else:
                future.set_result(self._grant(claim.key, claim.gpus))
                log.info("GPUs %s to %s", ", ".join(claim.gpus), claim.key.task_id)

    @property
    def usable_count(self) -> int:
        return self.stock.hardware.gpus.count if self.stock.hardware else 0

    @property
    def busy_count(self) -> int:
        return sum(self.is_in_use(gpu.id) for gpu in self.stock.gpus)

    def queue(self) -> list[Claim]:
        return self.ledger.queue(self._clock())

    def _grant(self, key: TaskKey, ids: tuple[str, ...]) -> Grant:
        kinds = {gpu.id: gpu.kind for gpu in self.stock.gpus}
        kind = min((kinds[name] for name in ids), key=lambda one: one.memory_bytes)
        if len(ids) > 1 and not layout_of(self.stock.gpus).joined(ids):
            slower = min(kind.link_bandwidth, PCIE_BANDWIDTH)
            kind = kind.model_copy(update={"link": Link.PCIE, "link_bandwidth": slower})
        return Grant(key, ids, GpuSet(kind=kind, count=len(ids)))

    def _tell(self, key: TaskKey, gpu: str, why: str) -> None:
        for told in self._listeners:
            try:
                told(key, gpu, why)
            except Exception:  # one listener's mistake must not keep the others from hearing of it
                log.exception("telling %s of GPU %s failed", key.task_id, gpu)
