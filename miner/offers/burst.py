"""Many like offers at once, as when a validator goes through its tasks: each kind is refused once.

A decision depends on the offer without its task's name, on the moment, and on fleet, history, policy and
profile as they are. Where nothing of that has changed, time alone turns a refusal into something else only
slowly, when GPUs are free again or an hour of rest is over; so a refusal holds for all like offers of the
next seconds. The books keep it once for all of them (`store/offers.py`). An acceptance is never reused.
"""

from __future__ import annotations

import math
from operator import is_

from core.profile.load import LoadedProfile
from core.tasks import ImageModelType, TaskType
from core.wire import MinerTaskOffer
from miner.fleet.base import FleetSnapshot
from miner.offers.decide import decide
from miner.offers.decision import Decision
from miner.offers.history import History
from miner.offers.policies.load import LoadedPolicy

#: Beyond this a burst is no burst of like offers.
MOST_KEPT = 1000
#: A refusal is as good as new for so long: a validator asks again for the same task after 15 minutes.
HOLDS_FOR_S = 60.0

_Kind = tuple[str, float, TaskType, int | None, int | None, ImageModelType | None]


class Burst:
    """`decide`, with the refusals of the last seconds at hand."""

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._version = -1
        #: Since when refusals of this state are kept.
        self._since = -math.inf
        self._known: dict[_Kind, Decision] = {}

    def decide(
        self,
        offer: MinerTaskOffer,
        now: float,
        fleet: FleetSnapshot,
        history: History,
        policy: LoadedPolicy,
        profile: LoadedProfile,
        image_type: ImageModelType | None = None,
    ) -> Decision:
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
        kind = (
            offer.model,
            offer.hours_to_complete,
            offer.task_type,
            offer.ds_size,
            offer.model_params_count,
            image_type,
        )
        known = self._known.get(kind)
        if known is None:
            known = decide(offer, now, fleet, history, policy, profile, image_type=image_type)
            if not known.accepted and len(self._known) < MOST_KEPT:
                self._known[kind] = known
        return known
