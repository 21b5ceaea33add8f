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
        self._names: tuple[str, str] | None = None
        self._live_policy: LivePolicy
        self._live_profile: LiveProfile
        self.policy: LoadedPolicy
        self.profile: LoadedProfile

    def refresh(self, hardware: Hardware | None) -> None:
        """Take up what was edited. `ConfigError` when a policy or a profile that is new to us can't be used;
        one that is in force already stays in force."""
        names = (policy_name(self._settings, hardware), profile_name(self._settings, hardware))
        if names != self._names:
            self._load(*names)
            self._names = names
        self.policy, self.profile = self._live_policy.current(), self._live_profile.current()

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

    def _load(self, policy: str, profile: str) -> None:
        settings = self._settings
        policies, profiles = [settings.policy_dir], [settings.profile_dir]
        self._live_policy = LivePolicy(policy, policies, self._told("policy"), on_top(settings))
        self._live_profile = LiveProfile(profile, profiles, self._told("profile"))
        log.info("offers are judged by policy %s and profile %s", policy, profile)

    def _told(self, word: str) -> Callable[[ConfigError], None]:
        """An edit that can't be used."""
        return lambda error: self._alert(f"{word}_problem", f"the last good {word} stays in force: {error}")
