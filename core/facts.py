"""The base of every immutable record that travels: strict about keys, never NaN, never changed in place."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Record(BaseModel):
    """Frozen, no unknown keys, no infinities: what is written to JSON comes back equal."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def _sound(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


#: What somebody else's code or file may have said. Half a surrogate pair, which JSON can say and no file can
#: hold, becomes a question mark: a message must not end what it speaks of.
Said = Annotated[str, BeforeValidator(_sound)]


class Confidence(StrEnum):
    """How well a fact is known, best first."""

    CONFIG = "config"  # read from the model's own config.json, or measured
    GIVEN = "given"  # stated by whoever asked (an offer's parameter count, an operator's --rows)
    TABLE = "table"  # from our table of known models, matched by family and size
    NAME = "name"  # read out of the model's name
    GUESS = "guess"  # a typical value, because nothing better was there


#: Best first, to find the weakest of several.
RANKED = tuple(Confidence)


def weakest(found: list[Confidence]) -> Confidence:
    return max(found, key=RANKED.index, default=Confidence.GUESS)


def printable(text: str, keep: str = "\n\t") -> str:
    """Without what would steer a terminal or turn the reading direction: everything that somebody else has
    written passes here before it is shown."""
    if text.isprintable():
        return text
    return "".join(one if one in keep or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
