"""Decides with the policy, the profile and the history that are in force at the moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from core.configs import config_dir
from core.errors import ConfigError
from core.hardware import Hardware
from core.layers.live import LastGood, Stamp, stamp_of
from core.profile.live import LiveProfile
from core.profile.load import PROFILES, LoadedProfile, load_profile, profile_files
from core.tasks import ImageModelType
from core.wire import MinerTaskOffer
from miner.fleet.base import FleetSnapshot
from miner.offers.ask import understand
from miner.offers.decision_cache import Answer, DecisionCache
from miner.offers.history import History, Outcome
from miner.offers.policies.choice import (
    Chosen,
    not_in_force,
    on_top,
    policy_by_gpus,
    policy_in_force,
    profile_by_gpus,
    profile_in_force,
)
from miner.offers.policies.load import POLICIES, LivePolicy, LoadedPolicy, load_policy, policy_files
from miner.settings import Settings

log = logging.getLogger(__name__)

Alert = Callable[[str, str], None]

_NONE = Chosen("", "")


class Judge:
    """Nothing is read from disk when an offer comes: `refresh` does that, in the background."""

    def __init__(self, settings: Settings, alert: Alert) -> None:
        self.history = History()
        self._cache = DecisionCache()
        self._settings = settings
        self._alert = alert
        self._policy_chosen = self._profile_chosen = _NONE
        self._live_policy: LivePolicy
        self._live_profile: LiveProfile
        self.policy: LoadedPolicy
        self.profile: LoadedProfile
        kept = settings.data_dir / "last-good"
        self._last_policy = LastGood(kept / "policy.json")
        self._last_profile = LastGood(kept / "profile.json")
        #: All policies and profiles at the last look.
        self._stamp: Stamp | None = None

    def refresh(self, hardware: Hardware | None) -> None:
        """Take up what was edited. `ConfigError` when a policy or a profile that was chosen is not there; one
        that cannot be used is replaced by the last good one, or a shipped one, with an alert. `hardware` is
        all that there is, also what is out for a while: None while nobody knows, and then what is in force
        stays so."""
        if hardware is not None or not self._policy_chosen.name:
            self._choose(hardware)
        self.policy, self.profile = self._live_policy.current(), self._live_profile.current()
        if self._live_policy.problem is None:
            self._last_policy.keep(self._policy_chosen.name, self.policy.layers)
        if self._live_profile.problem is None:
            self._last_profile.keep(self._profile_chosen.name, self.profile.layers)
        self._tell_of_other_edits()

    def _choose(self, hardware: Hardware | None) -> None:
        settings = self._settings
        chosen = policy_in_force(settings, hardware)
        if chosen.name != self._policy_chosen.name:
            by_gpus = policy_by_gpus(hardware).name
            self._live_policy = LivePolicy(
                chosen.name,
                [settings.policy_dir],
                self._told("policy"),
                on_top(settings),
                lambda error: self._policy_instead(chosen.name, by_gpus, error),
            )
            log.info("offers are judged by policy %s: %s", chosen.name, chosen.why)
        self._policy_chosen = chosen
        policy = self._live_policy.current()
        chosen = profile_in_force(settings, policy, hardware)
        if chosen.name != self._profile_chosen.name:
            shipped = profile_by_gpus(policy, hardware).name
            self._live_profile = LiveProfile(
                chosen.name,
                [settings.profile_dir],
                self._told("profile"),
                lambda error: self._profile_instead(chosen.name, shipped, error),
            )
            log.info("trainings are planned by profile %s: %s", chosen.name, chosen.why)
        self._profile_chosen = chosen

    def _policy_instead(self, name: str, by_gpus: str, error: ConfigError) -> LoadedPolicy:
        kept, top = self._last_policy.layers(name, POLICIES), on_top(self._settings)
        if kept is not None:
            self._say_instead("policy", name, "what was last good of it", error)
            return LoadedPolicy(kept[-1].name, kept, top)
        own, shipped = policy_files([self._settings.policy_dir]), policy_files()
        found = load_policy(_shipped(name, by_gpus, own, shipped, error), (), top)
        self._say_instead("policy", name, f"the shipped {found.name}", error)
        return found

    def _profile_instead(self, name: str, by_gpus: str, error: ConfigError) -> LoadedProfile:
        kept = self._last_profile.layers(name, PROFILES)
        if kept is not None:
            self._say_instead("profile", name, "what was last good of it", error)
            return LoadedProfile(kept[-1].name, kept)
        own, shipped = profile_files([self._settings.profile_dir]), profile_files()
        found = load_profile(_shipped(name, by_gpus, own, shipped, error))
        self._say_instead("profile", name, f"the shipped {found.name}", error)
        return found

    def _say_instead(self, word: str, name: str, instead: str, error: ConfigError) -> None:
        text = f"{word} {name} cannot be used; {instead} is in force instead: {error}"
        self._alert(f"{word}_problem", text)

    def _tell_of_other_edits(self) -> None:
        """An edit that changes nothing, because another file is in force, is told."""
        settings, before = self._settings, self._stamp
        policies = (settings.policy_dir, config_dir() / "policies")
        profiles = (settings.profile_dir, config_dir() / "profiles")
        places = (
            ("policy", self.policy, self._policy_chosen, policies),
            ("profile", self.profile, self._profile_chosen, profiles),
        )
        self._stamp = {}
        for word, loaded, chosen, folders in places:
            stamp = stamp_of(file for folder in folders for file in folder.glob("*.yaml"))
            self._stamp |= stamp
            used = {layer.file for layer in loaded.layers}
            for file in stamp:
                if before is not None and file not in used and before.get(file) != stamp[file]:
                    text = not_in_force(word, file.stem, loaded.name, chosen)
                    self._alert(f"{word}_not_in_force", f"{file} was edited; {text}")

    @property
    def problems(self) -> dict[str, str | None]:
        """Why an edit is not in force; None where there is nothing wrong."""
        found = {"policy": self._live_policy.problem, "profile": self._live_profile.problem}
        return {f"{name}_problem": str(error) if error else None for name, error in found.items()}

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


def _shipped(
    name: str, by_gpus: str, own: Mapping[str, Path], shipped: Mapping[str, Path], error: ConfigError
) -> str:
    """The shipped file of the name, else the one for these GPUs. A name that nothing has is a slip in the
    settings, which has to be mended by hand."""
    if name not in own and not Path(name).is_file():
        raise error
    return name if name in shipped else by_gpus
