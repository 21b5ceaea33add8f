"""Faults of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.domain.errors import GodMinerError


class FaultKind(StrEnum):
    # The folder
    MISSING = "missing"
    UNREADABLE = "unreadable"
    NOT_A_FILE = "not_a_file"
    BAD_NAME = "bad_name"
    TOO_MUCH = "too_much"
    STRAY = "stray"
    BOTH_KINDS = "both_kinds"
    PICKLE = "pickle"
    CHANGED = "changed"

    # Weights
    BAD_HEADER = "bad_header"
    BAD_INDEX = "bad_index"
    NO_WEIGHTS = "no_weights"
    NOT_FINITE = "not_finite"
    WRAPPED = "wrapped"
    LAYOUT = "layout"
    ZERO_DELTA = "zero_delta"
    DEAD_WEIGHTS = "dead_weights"

    # Configuration
    BAD_JSON = "bad_json"
    WRONG_BASE = "wrong_base"
    CONFIG_CHANGED = "config_changed"
    VOCABULARY = "vocabulary"
    CONTEXT = "context"
    BAD_CARD = "bad_card"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: where, the value, and the rule with what to do."""

    kind: FaultKind
    where: str
    value: str
    rule: str

    def __str__(self) -> str:
        value = f" has {self.value}" if self.value else ""
        return f"{self.where}{value}: {self.rule}"

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "where": self.where, "value": self.value, "rule": self.rule}


class BadSubmission(GodMinerError):
    """A folder that must not be published as it is, with every fault found."""

    code = "bad_submission"

    def __init__(self, folder: str, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}"
        lines = [f"{folder} is not a valid submission, {count}", *(f"  - {fault}" for fault in self.faults)]
        super().__init__("\n".join(lines))


def printable(value: object, limit: int = 120) -> str:
    """A value from outside, made safe for a message: one line, printable, shortened."""
    text = ascii(value) if not isinstance(value, str) else value
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
