"""Who holds which GPUs, from when until when: in memory, without a clock or a task of its own.

Everything happens at one instant that the caller names; whoever decides about an offer and holds its GPUs in
the same breath can not be overtaken. What must survive the process is in the books.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from miner.fleet.base import Gpu, Hold, HoldKind, NamedLane, Placement, TaskKey
from miner.fleet.calendar import Calendar
from miner.fleet.claims import Claim, Stage
from miner.fleet.layout import FOREVER
from miner.fleet.schedule import Cards, Pass, Rules, queue_order


class Ledger:
    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.gpus: tuple[Gpu, ...] = ()
        self._shared: frozenset[str] = frozenset()
        self._failed: frozenset[str] = frozenset()
        self.unclean: set[str] = set()
        self._claims: dict[TaskKey, Claim] = {}
        self._holds: tuple[Hold, ...] | None = None

    # What is there

    def set_cards(
        self,
        gpus: Iterable[Gpu],
        *,
        failed: Collection[str] = (),
        unclean: Collection[str] = (),
        shared: Collection[str] = (),
    ) -> None:
        """The cards as they are now. A job can not go on with `failed` ones, `unclean` ones hold memory of
        the last job and are not given to the next yet, `shared` ones are used a little by somebody else."""
        self.gpus = tuple(gpus)
        self._failed, self.unclean, self._shared = frozenset(failed), set(unclean), frozenset(shared)

    def running_on(self, gpu: str) -> TaskKey | None:
        """Whose card it is now."""
        running = (claim for claim in self._claims.values() if claim.is_running and gpu in claim.gpus)
        return next((claim.key for claim in running), None)

    @property
    def holds(self) -> tuple[Hold, ...]:
        if self._holds is None:
            self._holds = tuple(claim.hold() for claim in self._claims.values())
        return self._holds

    @property
    def claims(self) -> list[Claim]:
        return list(self._claims.values())

    def claim(self, key: TaskKey) -> Claim | None:
        return self._claims.get(key)

    def queue(self, now: float) -> list[Claim]:
        """Those that wait, the next one first."""
        waiting = [claim for claim in self._claims.values() if claim.stage is Stage.WAITING]
        return sorted(waiting, key=lambda claim: queue_order(claim, now, self.rules.patience))

    # Promises

    def promise(
        self,
        key: TaskKey,
        placement: Placement,
        *,
        now: float,
        until: float,
        priority: float = 0.0,
        lane: NamedLane | None = None,
    ) -> bool:
        """Keep the placement's GPUs until `until` for an offer. False: somebody has one of them, or it is not
        there. A job keeps what it has, also when it is offered once more."""
        known = self._claims.get(key)
        if known is not None and known.kind is HoldKind.JOB:
            return True
        others = Calendar.of((hold for hold in self.holds if hold.key != key), now)
        usable = {gpu.id for gpu in self.gpus if gpu.out is None}
        start = max(placement.starts_at, now)
        if not placement.gpus or not all(
            gpu in usable and others.is_free(gpu, start, until) for gpu in placement.gpus
        ):
            return False
        self._set(
            Claim(
                key=key,
                kind=HoldKind.OFFER,
                stage=Stage.PROMISED,
                counts=(len(placement.gpus),),
                since=now,
                until=until,
                priority=_sane(priority),
                firm=True,
                lane=lane,
                gpus=placement.gpus,
                starts_at=placement.starts_at,
                length=until - placement.starts_at,
                latest=until,
            )
        )
        return True

    def restore(self, hold: Hold, *, firm: bool, now: float) -> None:
        """A promise of an earlier life of this process, as the books have it: it is not judged again, and
        `arrange` finds it another place where its own is gone."""
        claim = Claim(
            key=hold.key,
            kind=hold.kind,
            stage=Stage.PROMISED,
            counts=(max(len(hold.gpus), 1),),
            since=now,
            until=hold.ends_at,
            priority=_sane(hold.priority),
            firm=firm,
            gpus=hold.gpus,
            starts_at=hold.starts_at,
            length=max(hold.ends_at - hold.starts_at, 0.0) if firm else 0.0,
            latest=FOREVER if hold.kind is HoldKind.JOB else hold.ends_at,
        )
        self._set(claim)

    def renew(self, key: TaskKey, now: float) -> None:
        """The validator has asked for the same once more: the window begins later, and ends as much later."""
        claim = self._claims.get(key)
        if claim is not None and not claim.is_running:
            claim.begin(now, FOREVER)
            self._set(claim)

    def start(self, key: TaskKey, *, now: float, until: float, priority: float = 0.0) -> None:
        """The task is a job now, to be over at `until` at the latest. What an offer kept for it stays kept,
        as long as was planned from now on; without one it joins the queue."""
        claim = self._claims.get(key)
        if claim is None:
            claim = Claim(key, HoldKind.JOB, Stage.PROMISED, (1,), now, until, _sane(priority))
        claim.kind = HoldKind.JOB
        claim.begin(now, until)
        self._set(claim)

    def offer_again(self, key: TaskKey) -> None:
        """Take a `start` back."""
        claim = self._claims.get(key)
        if claim is not None and claim.stage is Stage.PROMISED:
            claim.kind = HoldKind.OFFER
            self._set(claim)

    # GPUs

    def ask(
        self,
        key: TaskKey,
        counts: Sequence[int],
        *,
        now: float,
        until: float,
        priority: float,
        exclusive: bool = False,
        lane: NamedLane | None = None,
    ) -> None:
        """Wait for GPUs. A job that has some asks for others: what it has is kept for it until then, if it
        is of any use to it. The priority that came with a promise or a start stands."""
        claim = self._claims.get(key)
        if claim is None:
            claim = Claim(key, HoldKind.JOB, Stage.WAITING, (), now, until, _sane(priority))
        if claim.is_running:
            claim.make_firm()
        claim.kind = HoldKind.JOB
        claim.begin(now, until)
        claim.stage, claim.aside = Stage.WAITING, False
        claim.counts = tuple(dict.fromkeys(count for count in counts if count > 0))
        claim.exclusive, claim.lane = exclusive, lane or claim.lane
        self._set(claim)

    def step_aside(self, key: TaskKey) -> bool:
        """Keep no GPU for a job until it asks for some. False: nothing has changed."""
        claim = self._claims.get(key)
        if claim is None or claim.aside or claim.stage is not Stage.PROMISED or claim.kind is HoldKind.OFFER:
            return False
        claim.aside = True
        self._set(claim)
        return True

    def in_the_way(self, key: TaskKey) -> list[Hold]:
        """Who has the GPUs that a waiting task is to get, or is to have them before it; of a task without a
        place: who has any."""
        mine = self._claims.get(key)
        if mine is None or mine.is_running:
            return []
        wanted = set(mine.gpus) or {gpu.id for gpu in self.gpus}
        before = mine.starts_at if mine.gpus else FOREVER
        return [
            hold
            for hold in self.holds
            if hold.key != key and hold.starts_at < before and not wanted.isdisjoint(hold.gpus)
        ]

    def leave(self, key: TaskKey) -> None:
        """Wait no more, or hand back what was given in that very moment. Its place is kept until
        `release`."""
        claim = self._claims.get(key)
        if claim is not None and claim.stage is not Stage.PROMISED:
            if claim.is_running:
                claim.make_firm()
            claim.stage = Stage.PROMISED
            self._set(claim)

    def adopt(self, key: TaskKey, gpus: Sequence[str], *, now: float, until: float) -> bool:
        """These are in use already. False: one of them is gone, or another job's."""
        known = {gpu.id for gpu in self.gpus if gpu.id not in self._failed}
        taken = {
            gpu
            for claim in self._claims.values()
            if claim.is_running and claim.key != key
            for gpu in claim.gpus
        }
        if not gpus or not known.issuperset(gpus) or not taken.isdisjoint(gpus):
            return False
        claim = self._claims.get(key) or Claim(key, HoldKind.JOB, Stage.RUNNING, (len(gpus),), now, until)
        claim.kind, claim.stage = HoldKind.JOB, Stage.RUNNING
        claim.until = min(claim.until, until) if claim.firm else until
        claim.latest = until
        claim.set_window(tuple(gpus), min(claim.starts_at, now) if claim.firm else now)
        self._set(claim)
        return True

    def extend(self, key: TaskKey, until: float) -> float:
        """What it has is kept for it until then, or until somebody else was promised one of its cards; never
        shorter than so far. Until when that is: `until` itself for a task that nothing is known of."""
        claim = self._claims.get(key)
        if claim is None:
            return until
        behind = (
            other.starts_at
            for other in self._claims.values()
            if other is not claim and other.firm and not other.is_running
            if not set(other.gpus).isdisjoint(claim.gpus)
        )
        claim.stretch(min(until, min(behind, default=FOREVER)))
        self._set(claim)
        return claim.until

    def release(self, key: TaskKey) -> None:
        if self._claims.pop(key, None) is not None:
            self._holds = None

    def arrange(self, now: float) -> list[Claim]:
        """Give out what can be given out; the claims that got GPUs by it."""
        for claim in self._claims.values():
            claim.wait(now)
        state = Cards(self.gpus, self._shared, self.unclean)
        granted = Pass(self._claims.values(), state, now, self.rules).granted
        holds = tuple(claim.hold() for claim in self._claims.values())
        if holds != self._holds:
            self._holds = holds
        return granted

    def _set(self, claim: Claim) -> None:
        self._claims[claim.key] = claim
        self._holds = None


def _sane(priority: float) -> float:
    """NaN would make a queue without an order."""
    return priority if priority == priority else 0.0
