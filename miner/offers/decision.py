"""What a policy answers. The policies themselves are elsewhere; everybody who stores, shows or sends a
decision needs only this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.wire import MinerTaskOffer


class Reason(NamedTuple):
    """One rule's verdict, in words that an operator can argue with."""

    rule: str
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    accepted: bool
    #: For the validator: short, true, no internals.
    message: str
    policy: str
    policy_hash: str
    reasons: tuple[Reason, ...] = ()
    score: float | None = None
    #: Factor name → (value, contribution to the score).
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)
    profile_hash: str | None = None


class Load(NamedTuple):
    """How much this miner has promised already, the offer at hand left out."""

    open_jobs: int
    held_offers: int


class Policy(Protocol):
    """Decides within microseconds from what is in memory: no network, no disk."""

    def decide(self, offer: MinerTaskOffer, load: Load) -> Decision: ...
