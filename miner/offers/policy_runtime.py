"""Decide with the policy, the profile and the history that are in force now, and follow the operator's
edits.

Refusals are cached: with nothing changed, one holds for all equal offers of the next minute, and is stored
once. An acceptance is never reused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from pathlib import Path
from typing import Any, Generic, TypeVar

from core.config.files import ConfigKind, ConfigLayer, config_dir
from core.config.live import FileStamps, LastGoodLayers, LiveConfig, file_stamps
from core.domain.decisions import Decision, TrainingWorth
from core.domain.errors import ConfigError
from core.domain.hardware import Hardware
from core.domain.tasks import ImageModelType
from core.domain.wire import MinerTaskOffer
from core.profile.resolve import PROFILE_KIND, LoadedProfile
from miner.fleet.base import FleetSnapshot
from miner.observe.alerts import AlertKind, SendAlert
from miner.offers.decide import decide_parsed, training_worth
from miner.offers.history import JobOutcome, SuccessHistory
from miner.offers.parsed_offer import ParsedOffer, parse_offer
from miner.offers.policies.load import (
    POLICY_KIND,
    ChosenName,
    LoadedPolicy,
    active_policy_name,
    active_profile_name,
    default_policy_name,
    default_profile_name,
    inactive_text,
    settings_overrides,
)
from miner.settings import Settings

log = logging.getLogger(__name__)

#: Ten kilobytes each; names are not part of the key, so only new shapes make it grow.
MAX_CACHED_REFUSALS = 512
#: Seconds that a refusal stays valid: a validator asks again for the same task after 15 minutes.
CACHE_SECONDS = 60.0

#: Alerts about what cannot be used, and about edits of a file that is not in force.
_PROBLEM = {POLICY_KIND.noun: AlertKind.POLICY_PROBLEM, PROFILE_KIND.noun: AlertKind.PROFILE_PROBLEM}
_NOT_IN_FORCE = {
    POLICY_KIND.noun: AlertKind.POLICY_NOT_IN_FORCE,
    PROFILE_KIND.noun: AlertKind.PROFILE_NOT_IN_FORCE,
}

C = TypeVar("C", bound=LoadedPolicy | LoadedProfile)


class _ConfigInForce(Generic[C]):
    """The policy or the profile in force: which was chosen, its files, and their last good state."""

    def __init__(
        self,
        kind: ConfigKind[Any],
        directory: Path,
        build: Callable[[str, Sequence[ConfigLayer[Any]]], C],
        last_good: Path,
        alert: SendAlert,
    ) -> None:
        self._kind, self._directory, self._build = kind, directory, build
        self._last_good = LastGoodLayers(last_good)
        self._alert = alert
        self._live: LiveConfig[C]
        self.chosen = ChosenName("", "")
        #: The reason why a later choice is not in force.
        self._not_found: ConfigError | None = None

    @property
    def noun(self) -> str:
        return self._kind.noun

    @property
    def problem(self) -> str | None:
        """The problem that keeps the current files out of force, or None if they are in force."""
        problem = self._not_found or self._live.problem
        return str(problem) if problem else None

    def choose(self, chosen: ChosenName, default: str) -> C:
        """Follow the files of the chosen name. `ConfigError` when nothing has it at the start; later, what is
        in force stays. Where they cannot be used, their last good state takes their place, else a shipped one
        of that name or of the name `default`."""
        try:
            if chosen.name != self.chosen.name:
                self._live = self._followed(chosen.name, default)
                log.info("%s %s is in force: %s", self.noun, chosen.name, chosen.why)
        except ConfigError as error:
            if not self.chosen.name:
                raise
            if str(error) != str(self._not_found):
                self._report(f"{self.noun} {self.chosen.name} stays in force: {error}")
            self._not_found = error
        else:
            self.chosen, self._not_found = chosen, None
        return self._live.refresh()

    def _followed(self, name: str, default: str) -> LiveConfig[C]:
        return LiveConfig(
            self._load,
            name,
            [self._directory],
            lambda error: self._report(f"the last good {self.noun} stays in force: {error}"),
            lambda error: self._replacement(name, default, error),
        )

    def refresh(self) -> C:
        config = self._live.refresh()
        if self._live.problem is None:
            self._last_good.keep(self.chosen.name, config.layers)
        return config

    def stamps(self) -> FileStamps:
        directories = (self._directory, config_dir() / self._kind.directory)
        return file_stamps(file for directory in directories for file in directory.glob("*.yaml"))

    def _load(self, name: str, directories: Sequence[Path] = ()) -> C:
        layers = self._kind.layers(name, directories)
        return self._build(layers[-1].name, layers)

    def _replacement(self, name: str, default: str, error: ConfigError) -> C:
        layers = self._last_good.layers(name, self._kind)
        if layers is not None:
            instead, config = "what was last good of it", self._build(layers[-1].name, layers)
        elif name not in self._kind.files([self._directory]) and not Path(name).is_file():
            raise error  # nothing has this name: a slip in the settings, which has to be mended by hand
        else:
            config = self._load(name if name in self._kind.files() else default)
            instead = f"the shipped {config.name}"
        self._report(f"{self.noun} {name} cannot be used; {instead} is in force instead: {error}")
        return config

    def _report(self, text: str) -> None:
        self._alert(_PROBLEM[self.noun], text)


class CachedDecision:
    """A decision, and its row in the store once that is on disk: equal refusals share the row."""

    __slots__ = ("decision", "decision_id")

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.decision_id: int | None = None


class DecisionCache:
    """Refusals by offer, for as long as nothing that they depend on has changed.

    The only cache on the way of an offer: a refusal that is found here needs neither a plan nor a row of its
    own, which is most of the cost of an offer.
    """

    def __init__(self) -> None:
        self._state: tuple[object, ...] = ()
        self._version = -1
        #: Since when refusals of this state are cached.
        self._since = -math.inf
        self._refusals: dict[ParsedOffer, CachedDecision] = {}

    def get_or_decide(
        self,
        offer: ParsedOffer,
        now: float,
        fleet: FleetSnapshot,
        history: SuccessHistory,
        policy: LoadedPolicy,
        profile: LoadedProfile,
    ) -> CachedDecision:
        # By identity: what these are made of never changes in place. The history does, and counts.
        state = (
            fleet.reservations,
            fleet.inventory,
            fleet.abilities,
            policy,
            profile,
            history,
        )
        if not (
            0.0 <= now - self._since < CACHE_SECONDS
            and self._version == history.version
            and all(map(is_, state, self._state))
        ):
            self._state, self._version, self._since = state, history.version, now
            self._refusals.clear()
        cached = self._refusals.get(offer)
        if cached is None:
            cached = CachedDecision(decide_parsed(offer, now, fleet, history, policy, profile))
            if not cached.decision.accepted:
                if len(self._refusals) >= MAX_CACHED_REFUSALS:
                    del self._refusals[next(iter(self._refusals))]
                self._refusals[offer] = cached
        return cached


class PolicyRuntime:
    """Nothing is read from disk when an offer comes: `refresh` does that, in the background."""

    def __init__(self, settings: Settings, alert: SendAlert) -> None:
        self.history = SuccessHistory()
        self.policy: LoadedPolicy
        self.profile: LoadedProfile
        self._cache = DecisionCache()
        self._settings = settings
        self._alert = alert
        overrides, last_good = settings_overrides(settings), settings.data_dir / "last-good"
        self._policies = _ConfigInForce(
            POLICY_KIND,
            settings.policy_dir,
            lambda name, layers: LoadedPolicy(name, layers, overrides),
            last_good / "policy.json",
            alert,
        )
        self._profiles = _ConfigInForce(
            PROFILE_KIND, settings.profile_dir, LoadedProfile, last_good / "profile.json", alert
        )
        #: All policies and profiles at the last refresh.
        self._stamps: FileStamps | None = None

    def refresh(self, hardware: Hardware | None) -> None:
        """Take up what was edited.

        `ConfigError` when at the start a policy or a profile that was chosen does not exist; one that cannot
        be used is replaced, with an alert. `hardware` is all that is installed, also what is out for a while:
        None while unknown, and then the policy in force stays.
        """
        if hardware is not None or not self._policies.chosen.name:
            chosen = active_policy_name(self._settings, hardware)
            policy = self._policies.choose(chosen, default_policy_name(hardware).name)
            chosen = active_profile_name(self._settings, policy, hardware)
            self._profiles.choose(chosen, default_profile_name(policy, hardware).name)
        self.policy, self.profile = self._policies.refresh(), self._profiles.refresh()
        self._alert_inactive_edits()

    def _alert_inactive_edits(self) -> None:
        """Send an alert for each edit that changes nothing, because another file is in force."""
        before, self._stamps = self._stamps, {}
        for kept, config in ((self._policies, self.policy), (self._profiles, self.profile)):
            stamps = kept.stamps()
            self._stamps |= stamps
            in_force = {layer.file for layer in config.layers}
            for file, stamp in stamps.items():
                if before is not None and file not in in_force and before.get(file) != stamp:
                    text = inactive_text(kept.noun, file.stem, config.name, kept.chosen)
                    self._alert(_NOT_IN_FORCE[kept.noun], f"{file} was edited; {text}")

    @property
    def problems(self) -> dict[str, str | None]:
        """Reasons why an edit is not in force, or None if all is well."""
        return {_PROBLEM[kept.noun]: kept.problem for kept in (self._policies, self._profiles)}

    def add_outcomes(self, outcomes: Iterable[JobOutcome]) -> None:
        for outcome in outcomes:
            self.history.add(outcome)

    def training_worth(
        self, offer: MinerTaskOffer, image_type: ImageModelType | None, fleet: FleetSnapshot, now: float
    ) -> TrainingWorth:
        """Return a task's worth by the policy in force. `fleet` is without what the task itself holds."""
        parsed, terms = parse_offer(offer, image_type), self.policy.terms
        chances = self.history.chances(parsed.kinds, parsed.model.family, parsed.params, terms.success, now)
        return training_worth(parsed, terms, chances, fleet)

    def decide(
        self,
        offer: MinerTaskOffer,
        now: float,
        fleet: FleetSnapshot,
        image_type: ImageModelType | None = None,
    ) -> CachedDecision:
        """`fleet` without what this task holds itself."""
        parsed = parse_offer(offer, image_type, self.policy.terms.rules.models_denied)
        return self._cache.get_or_decide(parsed, now, fleet, self.history, self.policy, self.profile)
