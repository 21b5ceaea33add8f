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
from miner.offers.ask import understand
from miner.offers.decision_cache import Answer, DecisionCache
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
        self._cache = DecisionCache()
        self._settings = settings
        self._alert = alert
        self._policy_name = self._profile_name = ""
        self._live_policy: LivePolicy
        self._live_profile: LiveProfile
        self.policy: LoadedPolicy
        self.profile: LoadedProfile

    def refresh(self, hardware: Hardware | None) -> None:
        """Take up what was edited. `ConfigError` when a policy or a profile that is new to us can't be used;
        one that is in force already stays in force. `hardware` is all that there is, also what is out for a
        while: None while nobody knows, and then what is in force stays so."""
        if hardware is not None or not self._policy_name:
            self._choose(hardware)
        self.policy, self.profile = self._live_policy.current(), self._live_profile.current()

    def _choose(self, hardware: Hardware | None) -> None:
        settings = self._settings
        name = policy_name(settings, hardware)
        if name != self._policy_name:
            folders = [settings.policy_dir]
            self._live_policy = LivePolicy(name, folders, self._told("policy"), on_top(settings))
            self._policy_name = name
            log.info("offers are judged by policy %s", name)
        name = profile_name(settings, self._live_policy.current(), hardware)
        if name != self._profile_name:
            self._live_profile = LiveProfile(name, [settings.profile_dir], self._told("profile"))
            self._profile_name = name
            log.info("trainings are planned by profile %s", name)

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.history.add(outcome)

    def decide(
        self,
        offer: MinerTaskOffer,
        now: float,
        fleet: FleetSnapshot,
        image_type: ImageModelType | None = None,
    ) -> Answer:
        """`fleet` without what this task holds itself."""
        ask = understand(offer, image_type, self.policy.terms.rules.models_denied)
        return self._cache.decide(ask, now, fleet, self.history, self.policy, self.profile)

    def _told(self, word: str) -> Callable[[ConfigError], None]:
        """An edit that can't be used."""
        return lambda error: self._alert(f"{word}_problem", f"the last good {word} stays in force: {error}")
