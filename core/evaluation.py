"""How validators evaluate: the lengths, markers and sampling that differ between their two generations.

Offers come from validators of 2025, whose evaluation image pins TRL 0.17: preferences and prompts are encoded
without special tokens. The tournaments of 2026 are evaluated in an image with TRL 1.5: special tokens are on,
prompt and answer of a preference are encoded as one text, and what is too long loses its end instead of its
beginning. Instruct and chat are evaluated alike in both.
"""

from __future__ import annotations

import math
from enum import StrEnum

from core.facts import Record

#: Instruct and chat: rows longer than this are left out of the evaluation.
SEQUENCE_LIMIT = 4096
#: DPO: of the loss, and the loss of a model that learned nothing.
DPO_BETA = 0.1
UNTRAINED_DPO = math.log(2)
#: GRPO: completions per prompt, tokens of each, what a nat of KL on the prompts costs, and how long a prompt
#: may be in that.
GRPO_GENERATIONS = 2
GRPO_COMPLETION = 256
GRPO_KL_WEIGHT = 0.5
GRPO_KL_LENGTH = 512
#: A model whose window is unknown.
UNKNOWN_WINDOW = 8192


class Era(StrEnum):
    """Who evaluates: the validators that send offers, or those that hold tournaments."""

    OFFERS = "2025"
    TOURNAMENTS = "2026"


class Rules(Record):
    """What an era's evaluation does with preferences and prompts."""

    era: Era
    #: Whether tokenizers add what they usually add (a token for the beginning) to preferences and prompts.
    special_tokens: bool
    #: DPO: prompt and answer encoded as one text, and then cut where the prompt's own encoding ends.
    dpo_joint: bool
    #: DPO: the prompt keeps its last so many tokens; None: all.
    dpo_prompt: int | None
    #: DPO: the longest pair; None: the model's window.
    dpo_length: int | None
    #: DPO: a pair that is too long loses its beginning (True) or its end.
    dpo_keep_end: bool
    #: GRPO: the prompt keeps its last so many tokens; None: all.
    grpo_prompt: int | None
    grpo_temperature: float
    #: 0: all of them.
    grpo_top_k: int

    def dpo_limit(self, window: int | None) -> int:
        return self.dpo_length or window or UNKNOWN_WINDOW


_RULES = {
    Era.OFFERS: Rules(
        era=Era.OFFERS,
        special_tokens=False,
        dpo_joint=False,
        dpo_prompt=512,
        dpo_length=1024,
        dpo_keep_end=True,
        grpo_prompt=512,
        grpo_temperature=0.9,
        grpo_top_k=50,
    ),
    Era.TOURNAMENTS: Rules(
        era=Era.TOURNAMENTS,
        special_tokens=True,
        dpo_joint=True,
        dpo_prompt=None,
        dpo_length=None,
        dpo_keep_end=False,
        grpo_prompt=None,
        grpo_temperature=1.0,
        grpo_top_k=0,
    ),
}


def rules_of(era: Era) -> Rules:
    return _RULES[era]


def sequence_limit(window: int | None) -> int:
    """Instruct and chat: half the window of a model whose window is small."""
    if window is not None and window < 2 * SEQUENCE_LIMIT:
        return max(math.ceil(window / 2), 1)
    return SEQUENCE_LIMIT
