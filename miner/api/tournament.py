"""The rules of tournaments beside upstream's present ones."""

from __future__ import annotations

from miner.api.base import Answer


class UpstreamChange(Answer):
    """A rule that upstream has otherwise now, or no longer where it was."""

    name: str
    #: Upstream's file, and its name of the value there.
    file: str
    constant: str
    old: str
    new: str
    #: What of ours depends on it.
    uses: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} → {self.new}"


class RulesCheck(Answer):
    """The rules beside upstream's present ones."""

    #: Day of the rules that are compared, and the time of the comparison.
    as_of: str
    checked_at: float
    compared: int
    changes: tuple[UpstreamChange, ...] = ()
    #: Why some were not compared, such as a network that is not there.
    problem: str | None = None
