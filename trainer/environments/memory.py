"""The notes that a model keeps: 4 slots for a game and 8 for a match, each cut to 128 tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from core.domain.tournament_rules import MATCH

EMPTY = "(empty)"
#: Cut a text to so many tokens from its start (True) or its end (False); return a text that fits as it is.
Cut = Callable[[str, int, bool], str]


class Area(StrEnum):
    """The slots of a game or of a match."""

    WORKING = "working_memory"
    LONG_TERM = "long_term_memory"


SLOTS: Mapping[Area, int] = {Area.WORKING: MATCH.working_slots, Area.LONG_TERM: MATCH.long_term_slots}
#: The tools that change a slot, by their names in the schemas: the area, and whether the text is added.
MEMORY_TOOLS: Mapping[str, tuple[Area, bool]] = {
    f"{area}_{verb}": (area, verb == "append") for area in Area for verb in ("rewrite", "append")
}


def cut_words(text: str, tokens: int, start: bool) -> str:
    """Count words as tokens: what the evaluator does without a tokenizer."""
    words = text.split()
    if len(words) <= tokens:
        return text
    return " ".join(words[:tokens] if start else words[-tokens:])


def cut_tokens(tokenizer: Any) -> Cut:
    """Count a model's own tokens, as the evaluator does with the tokenizer of the served model."""

    def cut(text: str, tokens: int, start: bool) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= tokens:
            return text
        kept = ids[:tokens] if start else ids[-tokens:]
        return str(tokenizer.decode(kept, skip_special_tokens=True))

    return cut


def _no_notes() -> dict[Area, list[str]]:
    return {area: [""] * count for area, count in SLOTS.items()}


@dataclass(slots=True)
class Memory:
    """One model's notes in a match."""

    cut: Cut = cut_words
    slots: dict[Area, list[str]] = field(default_factory=_no_notes)

    def new_game(self) -> None:
        """Clear what is kept for one game only."""
        self.slots[Area.WORKING] = [""] * SLOTS[Area.WORKING]

    def rewrite(self, area: Area, slot: int, text: str) -> None:
        """Replace a slot, counted from 1; too long a text loses its end."""
        self.slots[area][slot - 1] = self.cut(text, MATCH.slot_tokens, True)

    def append(self, area: Area, slot: int, text: str) -> None:
        """Add to a slot as a new line; too long a text loses its start."""
        old = self.slots[area][slot - 1]
        self.slots[area][slot - 1] = self.cut(f"{old}\n{text}" if old else text, MATCH.slot_tokens, False)

    def apply(self, tool: str, arguments: Mapping[str, Any]) -> bool:
        """Do what a call of a memory tool asks for; False, and nothing done, where it cannot be done."""
        if tool not in MEMORY_TOOLS:
            return False
        area, adds = MEMORY_TOOLS[tool]
        slot = whole_number(arguments.get("slot"))
        if slot is None or not 1 <= slot <= SLOTS[area]:
            return False
        text = arguments.get("content", "")
        (self.append if adds else self.rewrite)(area, slot, text if isinstance(text, str) else str(text))
        return True

    def block(self) -> str:
        """All slots as the system prompt shows them."""
        return "\n\n".join(
            "\n".join(
                [
                    f"{area.upper()} (your notes):",
                    *(f"  [{number}] {text or EMPTY}" for number, text in enumerate(texts, 1)),
                ]
            )
            for area, texts in self.slots.items()
        )


def whole_number(value: Any) -> int | None:
    """An integer, or a text of one, as the evaluator takes it from a tool call."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        return int(value)
    except ValueError:
        return None
