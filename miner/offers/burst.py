"""Many like offers in one second, as when a validator goes through its tasks: each kind is weighed once.

A decision depends on the offer without its task's name, on the moment, and on fleet, history, policy and
profile as they are. Where nothing of that has changed within the second, the answer is the same one. An
acceptance changes the fleet, so no two offers are ever given the same GPUs.
"""

from __future__ import annotations

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

_Kind = tuple[str, float, TaskType, int | None, int | None, ImageModelType | None]


class Burst:
    """`decide`, with the answers of this second at hand."""

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._second = -1
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
        self._forget_unless_same(now, fleet, history, policy, profile)
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
            if len(self._known) < MOST_KEPT:
                self._known[kind] = known
        return known

    def _forget_unless_same(
        self,
        now: float,
        fleet: FleetSnapshot,
        history: History,
        policy: LoadedPolicy,
        profile: LoadedProfile,
    ) -> None:
        """By identity: what these are made of never changes in place. The history does, and counts."""
        state = (
            fleet.holds,
            fleet.gpus,
            fleet.hardware,
            fleet.trouble,
            fleet.ability,
            history,
            policy,
            profile,
        )
        second = int(now)
        same = (
            second == self._second
            and len(self._state) == len(state) + 1
            and self._state[-1] == history.version
            and all(here is there for here, there in zip(state, self._state, strict=False))
        )
        if not same:
            self._state, self._second = (*state, history.version), second
            self._known.clear()
