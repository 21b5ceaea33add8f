"""The one cache of the offer path: a validator that goes through its tasks asks much the same many times.

A decision depends on the `Ask` made of an offer, on the moment, and on fleet, history, policy and profile as
they are. Where nothing of these has changed, time alone turns a refusal into something else only slowly, when
GPUs are free again or an hour of rest is over; so a refusal holds for all equal asks of the next seconds, and
the store keeps it once for all of them. An acceptance is never reused.
"""

from __future__ import annotations

import math
from operator import is_

from core.profile.load import LoadedProfile
from miner.fleet.base import FleetSnapshot
from miner.offers.ask import Ask
from miner.offers.decide import decide_ask
from miner.offers.decision import Decision
from miner.offers.history import History
from miner.offers.policies.load import LoadedPolicy

#: Ten kilobytes each; names are no part of the key, so only new shapes make it grow.
MOST_KEPT = 512
#: A refusal is as good as new for so long: a validator asks again for the same task after 15 minutes.
HOLDS_FOR_S = 60.0


class Answer:
    """A decision, and its row in the store once that is on disk."""

    __slots__ = ("decision", "row")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.row: int | None = None


class DecisionCache:
    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._version = -1
        #: Since when refusals of this state are kept.
        self._since = -math.inf
        self._known: dict[Ask, Answer] = {}

    def decide(
        self,
        ask: Ask,
        now: float,
        fleet: FleetSnapshot,
        history: History,
        policy: LoadedPolicy,
        profile: LoadedProfile,
    ) -> Answer:
        # By identity: what these are made of never changes in place. The history does, and counts.
        state = (
            fleet.holds,
            fleet.gpus,
            fleet.hardware,
            fleet.trouble,
            fleet.ability,
            policy,
            profile,
            history,
        )
        if not (
            0.0 <= now - self._since < HOLDS_FOR_S
            and self._version == history.version
            and all(map(is_, state, self._state))
        ):
            self._state, self._version, self._since = state, history.version, now
            self._known.clear()
        known = self._known.get(ask)
        if known is None:
            known = Answer(decide_ask(ask, now, fleet, history, policy, profile))
            if not known.decision.accepted:
                if len(self._known) >= MOST_KEPT:
                    del self._known[next(iter(self._known))]
                self._known[ask] = known
        return known
