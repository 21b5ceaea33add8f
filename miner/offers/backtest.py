"""Several policies on the same offers, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from core.hardware import Hardware
from core.profile.load import LoadedProfile
from miner.offers.history import Outcome
from miner.offers.offered import Offered
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy
from miner.offers.replay import Entry, replay
from miner.offers.summary import Summary, summary


class Run(NamedTuple):
    summary: Summary
    entries: Sequence[Entry]


class Difference(NamedTuple):
    """An offer that two runs answer differently."""

    before: Entry
    after: Entry

    @property
    def why(self) -> str:
        """What made the one that refuses refuse."""
        refused = self.after if self.before.decision.accepted else self.before
        return refused.decision.failed[0].text if refused.decision.failed else ""


class Backtest:
    """The offers, and how they are judged: by one policy's value terms, or sums could not be compared."""

    def __init__(
        self,
        offers: Sequence[Offered],
        profile: LoadedProfile,
        hardware: Hardware,
        judge: Policy,
        outcomes: Iterable[Outcome] = (),
    ) -> None:
        self.offers = offers
        self.profile, self.hardware = profile, hardware
        self.judge = judge
        self.outcomes = tuple(outcomes)

    def run(self, name: str, policy: LoadedPolicy) -> Run:
        return self.told(
            name, replay(self.offers, policy, self.profile, self.hardware, self.outcomes, self.judge)
        )

    def told(self, name: str, entries: Sequence[Entry]) -> Run:
        return Run(summary(name, entries, self.hardware.gpus.count, self.judge.value), entries)


def differences(before: Run, after: Run) -> list[Difference]:
    pairs = zip(before.entries, after.entries, strict=True)
    return [Difference(*pair) for pair in pairs if pair[0].decision.accepted != pair[1].decision.accepted]
