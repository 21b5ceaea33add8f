"""The base class of every immutable record, and what records say about sources: confidence and foreign text.

Records are strict about their keys, never hold NaN and are never changed in place.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Record(BaseModel):
    """Frozen, no unknown keys, no infinities: what is written to JSON comes back equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _without_surrogates(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


#: Text from somebody else's code or file. Half a surrogate pair, which JSON can express and no file can hold,
#: becomes a question mark: reporting an error must not fail.
SanitizedText = Annotated[str, BeforeValidator(_without_surrogates)]


class Confidence(StrEnum):
    """Reliability of a fact, best first."""

    CONFIG = "config"  # read from the model's own config.json, or measured
    GIVEN = "given"  # stated by whoever asked (an offer's parameter count, an operator's --rows)
    TABLE = "table"  # from our table of known models, matched by family and size
    NAME = "name"  # read out of the model's name
    GUESS = "guess"  # a typical value, because nothing better was there


def weakest_confidence(confidences: list[Confidence]) -> Confidence:
    return max(confidences, key=list(Confidence).index, default=Confidence.GUESS)


#: Colours, movements of the cursor, titles of windows.
_TERMINAL_CODES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]"
)


def without_terminal_codes(text: str) -> str:
    """Text as a terminal would show it without colours: for the output of programs."""
    return _TERMINAL_CODES.sub("", text) if "\x1b" in text or "\x9b" in text else text


def printable(text: str, keep: str = "\n\t") -> str:
    """Text without control sequences and marks of direction: for everything from outside that is shown."""
    if text.isprintable():
        return text
    return "".join(
        char if char in keep or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text
    )
