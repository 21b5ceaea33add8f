"""GRPO rows: the prompt as text, its end where it is too long, and what the rewards want to know.

Evaluation gives the raw string to the model, no chat template. That of offers keeps the last 512 tokens;
that of tournaments keeps all, and the length that training can afford is what cuts. Axolotl takes prompts
as text, so they are cut as text, at the beginning of a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from core.evaluation import Rules
from core.recipes.datasets import GRPO_EXTRA, GRPO_PROMPT
from core.tasks import GrpoDataset
from trainer.inputs.files import Record, columns_of, need, text_of
from trainer.inputs.rows import PromptRow
from trainer.inputs.tokens import Tokenizer


def prompt_rows(dataset: GrpoDataset, rows: list[Record]) -> Iterator[PromptRow]:
    """One for each row, in order, whole: `shorten` brings prompts to a length."""
    columns = columns_of(rows)
    field = dataset.field_prompt or GRPO_PROMPT
    # The request speaks of the column by its first name; validators' files have it under the standard one.
    if field not in columns and GRPO_PROMPT in columns:
        field = GRPO_PROMPT
    need(columns, {"field_prompt": field})
    extra = next((name for name in (dataset.extra_column, GRPO_EXTRA) if name and name in columns), None)
    for row in rows:
        yield PromptRow(text_of(row.get(field)), row.get(extra) if dataset.extra_column and extra else None)


def shorten(prompts: Sequence[str], tokenizer: Tokenizer, rules: Rules, limit: int) -> Iterator[str]:
    """The end of each prompt, at most `limit` tokens long as evaluation counts them."""
    room = limit if rules.grpo_prompt is None else min(limit, rules.grpo_prompt)
    for start in range(0, len(prompts), 100):
        batch = list(prompts[start : start + 100])
        found = tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True)
        special = _special(tokenizer) if rules.special_tokens else 0
        for prompt, offsets in zip(batch, found["offset_mapping"], strict=True):
            yield _end(prompt, offsets, tokenizer, max(room - special, 1))


def _special(tokenizer: Tokenizer) -> int:
    """How many tokens the tokenizer adds by itself."""
    return len(tokenizer("a")["input_ids"]) - len(tokenizer("a", add_special_tokens=False)["input_ids"])


def _end(prompt: str, offsets: Sequence[tuple[int, int]], tokenizer: Tokenizer, room: int) -> str:
    """Cutting can change how the first word is encoded, so the rest is counted again."""
    drop = len(offsets) - room
    while 0 < drop < len(offsets):
        rest = prompt[offsets[drop][0] :]
        over = len(tokenizer(rest, add_special_tokens=False)["input_ids"]) - room
        if over <= 0:
            return rest
        drop += over
    return prompt if drop <= 0 else ""


def extra_text(value: Any) -> str | None:
    """What a row carries for the rewards, as the one string that tables of rows can hold."""
    if value is None:
        return None
    return text_of(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
