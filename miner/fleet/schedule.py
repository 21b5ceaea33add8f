"""Who gets GPUs now, and who is to have them when: one pass over all claims.

Running jobs keep what they have. Accepted offers keep the window that they were accepted with, as long as its
cards are there. The others are placed in the order of the queue, each in a window that those behind it may
not touch: a small job may go ahead of a large one that waits, but never make it wait longer. Nobody starves,
because whoever has waited for `patience` seconds goes before all that have not, first come first served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from miner.fleet.base import Gpu, HoldKind
from miner.fleet.calendar import OVERDUE_SECONDS, Calendar, Found
from miner.fleet.claims import Claim, Stage
from miner.fleet.layout import layout_of
from miner.fleet.placing import pools

#: So many of the queue get a window. Those behind wait for one: a queue that long is not served today.
MOST_PLANNED = 64


@dataclass(frozen=True, slots=True)
class Rules:
    #: Waited this long, a job goes before all that have not.
    patience: float = 3600.0
    #: Jobs that may have GPUs at a time.
    max_running: int = 10_000


class Cards(NamedTuple):
    gpus: Sequence[Gpu]
    #: Used a little by somebody else: nothing for a job that wants its cards to itself.
    shared: Collection[str] = ()
    #: Not to be given out at this moment.
    unclean: Collection[str] = ()


def queue_order(claim: Claim, now: float, patience: float) -> tuple[int, float, float]:
    if now - claim.since >= patience:
        return (0, claim.since, 0.0)
    return (1, -claim.priority, claim.since)


class Pass:
    """One look at everything. The claims are changed; `granted` are those that got GPUs."""

    def __init__(self, claims: Collection[Claim], cards: Cards, now: float, rules: Rules) -> None:
        self.granted: list[Claim] = []
        self._cards = cards
        self._usable = [gpu for gpu in cards.gpus if gpu.out is None]
        self._ids = {gpu.id for gpu in self._usable}
        self._layout = layout_of(cards.gpus)
        self._calendar = Calendar()
        self._now, self._rules = now, rules
        running = [claim for claim in claims if claim.is_running]
        waiting = [claim for claim in claims if not claim.is_running and not claim.aside]
        self._places_left = rules.max_running - len(running)
        for claim in running:
            self._calendar.add(claim.gpus, claim.starts_at, max(claim.until, now + OVERDUE_SECONDS))
        for claim in claims:
            if claim.aside:
                claim.set_window((), claim.until)
        self._keep_promises([claim for claim in waiting if claim.firm])
        self._serve([claim for claim in waiting if claim.until > now])

    def _keep_promises(self, firm: list[Claim]) -> None:
        """Promises stand that can; for those that can not, started jobs first, there may be other cards."""
        moved = []
        for claim in sorted(firm, key=lambda one: (one.kind is HoldKind.OFFER, one.starts_at, one.since)):
            if claim.gpus and self._stands(claim):
                self._calendar.add(claim.gpus, claim.starts_at, claim.until)
            else:
                moved.append(claim)
        for claim in moved:
            # Who asks has said what will do; for who does not ask yet, fewer are better than none.
            asks = claim.stage is Stage.WAITING or not claim.counts
            fewer = () if asks else tuple(range(max(claim.counts) - 1, 0, -1))
            self._plan(claim, (claim.counts, fewer))

    def _stands(self, claim: Claim) -> bool:
        start = max(claim.starts_at, self._now)
        return self._ids.issuperset(claim.gpus) and all(
            self._calendar.is_free(gpu, start, claim.until) for gpu in claim.gpus
        )

    def _serve(self, waiting: list[Claim]) -> None:
        order = sorted(waiting, key=lambda one: queue_order(one, self._now, self._rules.patience))
        for claim in order[MOST_PLANNED:]:
            if not claim.firm:
                claim.set_window((), claim.until)
        for claim in order[:MOST_PLANNED]:
            if claim.firm and claim.gpus:
                self._calendar.remove(claim.gpus, claim.starts_at, claim.until)
            if claim.stage is Stage.WAITING and self._grant(claim):
                self.granted.append(claim)
            elif claim.firm and (claim.stage is Stage.PROMISED or len(claim.gpus) in claim.counts):
                self._calendar.add(claim.gpus, claim.starts_at, claim.until)
            else:
                self._plan(claim, (claim.counts,))

    def _grant(self, claim: Claim) -> bool:
        if self._places_left <= 0:
            return False
        now, unclean = self._now, self._cards.unclean
        counts = claim.counts
        if claim.firm and claim.gpus and claim.starts_at > now:
            # That waiting for so many trains more than fewer at once was weighed before they were promised.
            counts = tuple(count for count in counts if count >= len(claim.gpus))
        found = self._promised(claim) or next(self._options(claim, counts, now, unclean), None)
        if found is None:
            return False
        claim.stage = Stage.RUNNING
        claim.set_window(found.gpus, found.start, found.end)
        self._calendar.add(found.gpus, found.start, found.end)
        self._places_left -= 1
        return True

    def _promised(self, claim: Claim) -> Found | None:
        """The very cards that were promised, where they are as many as are wished for most."""
        if not (claim.firm and claim.gpus and claim.starts_at <= self._now):
            return None
        bad = {*self._cards.unclean, *(self._cards.shared if claim.exclusive else ())}
        fits = len(claim.gpus) == claim.counts[0] if claim.counts else False
        if not fits or not bad.isdisjoint(claim.gpus) or not self._ids.issuperset(claim.gpus):
            return None
        free = all(self._calendar.is_free(gpu, self._now, claim.until) for gpu in claim.gpus)
        return Found(claim.gpus, self._now, claim.until) if free else None

    def _plan(self, claim: Claim, wishes: Sequence[Sequence[int]]) -> None:
        """The window that begins first, of those for the first of the wishes that has any."""
        claim.set_window((), claim.until)
        for counts in wishes:
            latest = claim.latest if claim.firm else claim.until
            found = min(self._options(claim, counts, latest), key=lambda one: one.start, default=None)
            if found is not None:
                claim.set_window(found.gpus, found.start, found.end)
                self._calendar.add(found.gpus, found.start, found.end)
                return

    def _options(
        self, claim: Claim, counts: Sequence[int], latest: float, leave_out: Collection[str] = ()
    ) -> Iterator[Found]:
        """The first window for each count, in the order of the counts."""
        bad = {*leave_out, *(self._cards.shared if claim.exclusive else ())}
        usable = [gpu for gpu in self._usable if gpu.id not in bad]
        for count in counts:
            for _, pool in pools(usable, claim.lane):
                found = self._calendar.earliest(
                    pool, count, self._layout, first=self._now, latest=latest, end_of=claim.end_at
                )
                if found is not None:
                    yield found
