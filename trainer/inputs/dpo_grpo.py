"""DPO pairs and GRPO prompts as the evaluation reads them: raw strings, no chat template.

The two generations of evaluation differ (`core.domain.evaluation`): offers encode prompt and answers apart,
without special tokens, and keep the end of a pair; tournaments encode both as one text and cut the end.
Axolotl takes GRPO prompts as text, so they are cut as text, at the beginning of a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from core.domain.evaluation import EvaluationRules
from core.domain.tasks import DpoDataset, GrpoDataset
from core.recipes.axolotl.data_keys import GRPO_EXTRA, GRPO_PROMPT
from trainer.inputs.files import RawRow, columns_of, require_columns, text_of
from trainer.inputs.tokens import PairRow, PromptRow, Tokenizer, compact_ids, encode, tokenized

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


def pair_texts(dataset: DpoDataset, rows: list[RawRow]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen, rejected. Formats and the system column are not applied in evaluation, so not here."""
    names = {
        "field_prompt": dataset.field_prompt or PROMPT,
        "field_chosen": dataset.field_chosen or CHOSEN,
        "field_rejected": dataset.field_rejected or REJECTED,
    }
    require_columns(columns_of(rows), names)
    prompt, chosen, rejected = names.values()
    for row in rows:
        yield text_of(row.get(prompt)), text_of(row.get(chosen)), text_of(row.get(rejected))


def pair_rows(
    dataset: DpoDataset, rows: list[RawRow], tokenizer: Tokenizer, rules: EvaluationRules
) -> Iterator[PairRow]:
    """Encode each row, in order and uncut: `cut_pair` shortens it."""
    texts = list(pair_texts(dataset, rows))
    prompts = encode(tokenizer, [prompt for prompt, _, _ in texts], special_tokens=rules.special_tokens)
    sides = [[chosen for _, chosen, _ in texts], [rejected for _, _, rejected in texts]]
    if not rules.dpo_joint:
        answers = [encode(tokenizer, side, special_tokens=rules.special_tokens) for side in sides]
        for prompt, chosen, rejected in zip(prompts, *answers, strict=True):
            end = [tokenizer.eos_token_id or 0]
            yield PairRow(compact_ids(prompt), compact_ids([*chosen, *end]), compact_ids([*rejected, *end]))
        return
    joined = [_encode_joined(texts, side, tokenizer) for side in sides]
    for prompt, chosen, rejected in zip(prompts, *joined, strict=True):
        start = len(prompt)
        yield PairRow(compact_ids(prompt), compact_ids(chosen[start:]), compact_ids(rejected[start:]))


def _encode_joined(
    texts: Sequence[tuple[str, str, str]], side: Sequence[str], tokenizer: Tokenizer
) -> Iterator[list[int]]:
    end = tokenizer.eos_token or ""
    ended = [answer if answer.endswith(end) else answer + end for answer in side]
    return encode(tokenizer, [prompt + answer for (prompt, _, _), answer in zip(texts, ended, strict=True)])


def cut_pair(row: PairRow, rules: EvaluationRules, length: int) -> PairRow | None:
    """The pair as evaluation sees it when `length` is the longest; None when nothing of an answer is left."""
    prompt, chosen, rejected = row
    if rules.dpo_prompt is not None:
        prompt = prompt[-rules.dpo_prompt :]
    if rules.dpo_keep_end:
        # Both sides lose the same count from the front, so they keep a common prompt.
        over = max(len(prompt) + max(len(chosen), len(rejected)) - length, 0)
        beyond = max(over - len(prompt), 0)
        prompt, chosen, rejected = prompt[over:], chosen[beyond:], rejected[beyond:]
    else:
        room = max(length - len(prompt), 0)
        prompt, chosen, rejected = prompt[:length], chosen[:room], rejected[:room]
    if not chosen or not rejected:
        return None
    return PairRow(prompt, chosen, rejected)


def has_equal_answers(row: PairRow) -> bool:
    """Equal answers: the loss is ln 2 whatever the model does, and its gradient is zero."""
    return list(row.chosen) == list(row.rejected)


def prompt_rows(dataset: GrpoDataset, rows: list[RawRow]) -> Iterator[PromptRow]:
    """The prompt of each row, in order and uncut: `shorten_prompts` shortens it."""
    columns = columns_of(rows)
    field = dataset.field_prompt or GRPO_PROMPT
    # The request speaks of the column by its first name; validators' files have it under the standard one.
    if field not in columns and GRPO_PROMPT in columns:
        field = GRPO_PROMPT
    require_columns(columns, {"field_prompt": field})
    extra = next((name for name in (dataset.extra_column, GRPO_EXTRA) if name and name in columns), None)
    for row in rows:
        yield PromptRow(text_of(row.get(field)), row.get(extra) if dataset.extra_column and extra else None)


def shorten_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, rules: EvaluationRules, limit: int
) -> Iterator[str]:
    """The end of each prompt, at most `limit` tokens long as evaluation counts them."""
    room = limit if rules.grpo_prompt is None else min(limit, rules.grpo_prompt)
    for start in range(0, len(prompts), 100):
        batch = list(prompts[start : start + 100])
        encoding = tokenized(tokenizer, batch, add_special_tokens=False, return_offsets_mapping=True)
        special = _special_count(tokenizer) if rules.special_tokens else 0
        for prompt, offsets in zip(batch, encoding["offset_mapping"], strict=True):
            yield _last_tokens(prompt, offsets, tokenizer, max(room - special, 1))


def _special_count(tokenizer: Tokenizer) -> int:
    """Return the number of tokens that the tokenizer adds by itself."""
    with_them = tokenized(tokenizer, "a")["input_ids"]
    return len(with_them) - len(tokenized(tokenizer, "a", add_special_tokens=False)["input_ids"])


def _last_tokens(prompt: str, offsets: Sequence[tuple[int, int]], tokenizer: Tokenizer, room: int) -> str:
    """The last tokens as text. Cutting can change how the first word is encoded, so the rest is counted
    again."""
    drop = len(offsets) - room
    while 0 < drop < len(offsets):
        rest = prompt[offsets[drop][0] :]
        over = len(tokenized(tokenizer, rest, add_special_tokens=False)["input_ids"]) - room
        if over <= 0:
            return rest
        drop += over
    return prompt if drop <= 0 else ""


def extra_text(value: Any) -> str | None:
    """The extra column's value for the rewards, as a string, which is what tables of rows can hold."""
    if value is None:
        return None
    return text_of(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
