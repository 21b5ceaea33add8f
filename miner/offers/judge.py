"""Decides with the policy, the profile and the history that are in force at the moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from core.errors import ConfigError
from core.hardware import Hardware
from core.profile.live import LiveProfile
from core.profile.load import LoadedProfile
from core.tasks import ImageModelType
from core.wire import MinerTaskOffer
from miner.fleet.base import FleetSnapshot
from miner.offers.decide import decide
from miner.offers.decision import Decision
from miner.offers.history import History, Outcome
from miner.offers.policies.choice import on_top, policy_name, profile_name
from miner.offers.policies.load import LivePolicy, LoadedPolicy
from miner.settings import Settings

log = logging.getLogger(__name__)

Alert = Callable[[str, str], None]


class Judge:
    """Nothing is read from disk when an offer comes: `refresh` does that, in the background."""

    def __init__(self, settings: Settings, alert: Alert) -> None:
        self.history = History()
        self._settings = settings
        self._alert = alert
        #: What is loaded: a policy may name another profile when it is edited.
        self._names: dict[str, str] = {}
        self._live_policy: LivePolicy
        self._live_profile: LiveProfile
        self.policy: LoadedPolicy
        self.profile: LoadedProfile

    def refresh(self, hardware: Hardware | None) -> None:
        """Take up what was edited. `ConfigError` when a policy or a profile that is new to us can't be used;
        one that is in force already stays in force."""
        settings = self._settings
        name = policy_name(settings, hardware)
        if self._is_new("policy", name):
            self._live_policy = LivePolicy(
                name, [settings.policy_dir], self._told("policy"), on_top(settings)
            )
            self._loaded("policy", name)
        self.policy = self._live_policy.current()
        name = profile_name(settings, self.policy, hardware)
        if self._is_new("profile", name):
            self._live_profile = LiveProfile(name, [settings.profile_dir], self._told("profile"))
            self._loaded("profile", name)
        self.profile = self._live_profile.current()

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.history.add(outcome)

    def decide(
        self,
        offer: MinerTaskOffer,
        now: float,
        fleet: FleetSnapshot,
        image_type: ImageModelType | None = None,
    ) -> Decision:
        """`fleet` without what this task holds itself."""
        return decide(offer, now, fleet, self.history, self.policy, self.profile, image_type=image_type)

    def _is_new(self, word: str, name: str) -> bool:
        return self._names.get(word) != name

    def _loaded(self, word: str, name: str) -> None:
        self._names[word] = name
        log.info("offers are judged by %s %s", word, name)

    def _told(self, word: str) -> Callable[[ConfigError], None]:
        """An edit that can't be used."""
        return lambda error: self._alert(f"{word}_problem", f"the last good {word} stays in force: {error}")
