"""What this miner has promised, and to whom: decided and held in one breath.

Nothing in here waits, so whoever comes next sees what the one before was promised: two offers can not both
get the last GPUs. Memory decides; the books are what a restart takes up again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from core.budget import Refusal
from core.tasks import ImageModelType
from core.wire import MinerTaskOffer
from miner.fleet.base import TaskKey
from miner.fleet.local import LocalFleet
from miner.jobs.states import EndReason
from miner.offers.decision import Decision, Reason
from miner.offers.decision_cache import Answer
from miner.offers.judge import Judge
from miner.store.jobs import Start
from miner.store.offers import Place, Taken

log = logging.getLogger(__name__)

#: Of a start that nobody accepted: behind everything that somebody did.
LOWEST = -1e6
#: Refusals of a plan that nothing which may still be learned of the task will change.
_HOPELESS = frozenset({Refusal.NO_TIME, Refusal.NO_MEMORY, Refusal.ABSURD_SIZE})


class Promises:
    def __init__(self, judge: Judge, fleet: LocalFleet, *, hold_seconds: float) -> None:
        self._judge = judge
        self._fleet = fleet
        self._hold_seconds = hold_seconds
        #: Jobs that are not over.
        self.jobs: set[TaskKey] = set()
        #: Accepted offers, and until when each waits for its start.
        self.holds: dict[TaskKey, float] = {}

    def __contains__(self, key: TaskKey) -> bool:
        return key in self.jobs or key in self.holds

    def restore(self, taken: Iterable[Taken]) -> None:
        """Take up what earlier lives of this daemon have promised."""
        known = list(taken)
        for place, deadline in known:
            if deadline is None:
                self.holds[place.hold.key] = place.lapses_at
            else:
                self.jobs.add(place.hold.key)
        self._fleet.restore((place.hold, place.firm) for place, _ in known)

    def place(self, key: TaskKey) -> Place | None:
        """What a task holds now, for the books."""
        claim = self._fleet.ledger.claim(key)
        if claim is None:
            return None
        return Place(claim.hold(), claim.firm, self.holds.get(key, claim.until))

    # Offers

    def offered(self, key: TaskKey, offer: MinerTaskOffer, now: float) -> Answer | None:
        """Decide, and hold what was promised. None: it is promised already, from now on for as long again."""
        if key in self.holds:
            self._fleet.renew(key, now)
            self.holds[key] = now + self._hold_seconds
            return None
        answer = self._judge.decide(offer, now, self._fleet.snapshot(now).without(key))
        if not answer.decision.accepted or key in self.jobs:  # a job keeps what it has
            return answer
        if not self._hold(key, answer.decision):
            return Answer(_overbooked(answer.decision))
        self.holds[key] = now + self._hold_seconds
        return answer

    def give_up(self, key: TaskKey) -> None:
        """Nothing is held for this offer any more; what has become a job meanwhile, stays one."""
        if self.holds.pop(key, None) is not None:
            self._fleet.release(key)

    def lapse(self, now: float) -> list[TaskKey]:
        """Give up the offers whose start never came; which they were."""
        lapsed = [key for key, until in self.holds.items() if until <= now]
        for key in lapsed:
            self.give_up(key)
        return lapsed

    # Starts

    def judge(
        self, key: TaskKey, start: Start, image_type: ImageModelType | None, now: float
    ) -> tuple[Decision, EndReason | None]:
        """A start that no accepted offer went before, as if it were offered now with the hours that are left;
        and why it is hopeless, if it is."""
        offer = MinerTaskOffer(
            model=start.model,
            hours_to_complete=max(start.deadline_at - now, 0.0) / 3600,
            task_id=start.task_id,
            task_type=start.task_type,
        )
        fleet = self._fleet.snapshot(now).without(key)
        decision = self._judge.decide(offer, now, fleet, image_type).decision
        if decision.plan is None and decision.refusal is None:
            # All GPUs are held for longer than an offer may wait. A start waits until its deadline.
            planned = self._judge.decide(offer, now, replace(fleet, holds=()), image_type).decision
            if (end := self._hopeless(start, planned, now)) is not None:
                return planned, end
        return decision, self._hopeless(start, decision, now)

    def started(self, key: TaskKey, start: Start, decision: Decision | None) -> None:
        """The task is a job from now on: with the GPUs promised to it, or in the queue for some."""
        if decision is not None and decision.accepted:
            self._hold(key, decision)
        if decision is not None or self._fleet.ledger.claim(key) is not None:
            self._fleet.start(key, until=start.deadline_at, priority=LOWEST)
        self.holds.pop(key, None)
        self.jobs.add(key)

    def not_started(self, key: TaskKey, lapses_at: float) -> None:
        """The start of an accepted offer could not be written down: it is an accepted offer still."""
        self.jobs.discard(key)
        self.holds[key] = lapses_at
        self._fleet.ledger.offer_again(key)

    def over(self, key: TaskKey) -> None:
        """The job has ended, however. GPUs that a run of it still uses are given back when that has ended."""
        self.jobs.discard(key)
        self.holds.pop(key, None)
        claim = self._fleet.ledger.claim(key)
        if claim is not None and not claim.is_running:
            self._fleet.release(key)

    def _hold(self, key: TaskKey, decision: Decision) -> bool:
        placement = decision.placement
        return placement is not None and self._fleet.promise(
            key, placement, until=placement.ends_at, priority=decision.priority, lane=decision.lane
        )

    def _hopeless(self, start: Start, decision: Decision, now: float) -> EndReason | None:
        """A miner that was named for a task is scored for it whatever it answers: so it is only given up at
        once where no training could come to anything."""
        if start.deadline_at <= now:
            return EndReason.DEADLINE
        if decision.accepted or decision.refusal not in _HOPELESS:
            return None
        stock = self._fleet.stock
        if decision.refusal is Refusal.NO_MEMORY and any(gpu.out is not None for gpu in stock.gpus):
            return None  # more cards may be back in time
        return EndReason.INFEASIBLE


def _overbooked(decision: Decision) -> Decision:
    """Decided on a snapshot of the same instant, so only a mistake of ours leads here. It must not become a
    promise that can not be kept."""
    log.error("the place chosen for an offer is not free: %s", decision.placement)
    reason = Reason("gpus", False, f"the place chosen is not free after all: {decision.placement}")
    message = "Not taken: no capacity at the moment"
    return replace(decision, accepted=False, message=message, reasons=(*decision.reasons, reason))
