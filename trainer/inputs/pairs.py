"""DPO rows as evaluation encodes them: raw strings, no chat template, no formats, the end token after each
answer.

The two generations of evaluation differ (`core.evaluation`). That of offers encodes prompt and answers
apart and without special tokens, keeps the prompt's last 512 tokens and then the last 1024 of the pair;
both answers lose as much at their beginning as the longer one has too much. That of tournaments encodes
prompt and answer as one text with special tokens, and cuts the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.evaluation import Rules
from core.tasks import DpoDataset
from trainer.inputs.files import Record, columns_of, need, text_of
from trainer.inputs.rows import PairRow, compact
from trainer.inputs.tokens import Tokenizer, encode

PROMPT, CHOSEN, REJECTED = "prompt", "chosen", "rejected"


def pair_texts(dataset: DpoDataset, rows: list[Record]) -> Iterator[tuple[str, str, str]]:
    """Prompt, chosen, rejected. Formats and the system column are not applied in evaluation, so not here."""
    names = {
        "field_prompt": dataset.field_prompt or PROMPT,
        "field_chosen": dataset.field_chosen or CHOSEN,
        "field_rejected": dataset.field_rejected or REJECTED,
    }
    need(columns_of(rows), names)
    prompt, chosen, rejected = names.values()
    for row in rows:
        yield text_of(row.get(prompt)), text_of(row.get(chosen)), text_of(row.get(rejected))


def pair_rows(
    dataset: DpoDataset, rows: list[Record], tokenizer: Tokenizer, rules: Rules
) -> Iterator[PairRow]:
    """One for each row, in order, whole: `cut` brings it to a length."""
    texts = list(pair_texts(dataset, rows))
    prompts = encode(tokenizer, [prompt for prompt, _, _ in texts], special_tokens=rules.special_tokens)
    sides = [[chosen for _, chosen, _ in texts], [rejected for _, _, rejected in texts]]
    if not rules.dpo_joint:
        answers = [encode(tokenizer, side, special_tokens=rules.special_tokens) for side in sides]
        for prompt, chosen, rejected in zip(prompts, *answers, strict=True):
            end = [tokenizer.eos_token_id or 0]
            yield PairRow(compact(prompt), compact([*chosen, *end]), compact([*rejected, *end]))
        return
    whole = [_joined(texts, side, tokenizer) for side in sides]
    for prompt, chosen, rejected in zip(prompts, *whole, strict=True):
        start = len(prompt)
        yield PairRow(compact(prompt), compact(chosen[start:]), compact(rejected[start:]))


def _joined(
    texts: Sequence[tuple[str, str, str]], side: Sequence[str], tokenizer: Tokenizer
) -> Iterator[list[int]]:
    end = tokenizer.eos_token or ""
    ended = [answer if answer.endswith(end) else answer + end for answer in side]
    return encode(tokenizer, [prompt + answer for (prompt, _, _), answer in zip(texts, ended, strict=True)])


def cut(row: PairRow, rules: Rules, length: int) -> PairRow | None:
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


def says_nothing(row: PairRow) -> bool:
    """Equal answers: the loss is ln 2 whatever the model does, and its gradient is zero."""
    return list(row.chosen) == list(row.rejected)
