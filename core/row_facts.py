"""Dataset facts from rows of text, where there is no tokenizer at hand: lengths by counting bytes.

The daemon has none by design. English prose makes about four bytes a token with today's vocabularies, code
and other languages fewer; the divisor errs towards more tokens, which costs a plan a little time and saves
it from a sequence that is too short. The trainer measures again with the real tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from core.data import DatasetFacts
from core.data_facts import facts_from_lengths
from core.facts import Confidence
from core.tasks import TaskType

BYTES_PER_TOKEN = 3.6
#: Markup around one chat message.
MESSAGE_TOKENS = 5
#: Columns as validators' files name them, and as field names often do, by what they are.
PROMPTS = ("system", "instruct", "instruction", "input", "prompt", "question")
ANSWERS = ("output", "answer", "response", "completion", "chosen")
REJECTED = ("rejected",)
MESSAGES = ("conversations", "messages")
ASSISTANT = ("assistant", "gpt", "model", "bot")

Row = Mapping[str, Any]


def facts_from_rows(task_type: TaskType, sample: Sequence[Row], rows: int | None = None) -> DatasetFacts:
    """From sampled rows of a file with `rows` rows in all. Columns are known by their usual names."""
    if task_type is TaskType.CHAT:
        pairs = [_chat(row) for row in sample]
        prompts, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        prompts = [_tokens(row, PROMPTS) for row in sample]
        answers = [0 if task_type is TaskType.GRPO else _answer(row) for row in sample]
    rejected = [_tokens(row, REJECTED) for row in sample] if task_type is TaskType.DPO else None
    facts = facts_from_lengths(task_type, prompts, answers, rejected, rows)
    return facts.model_copy(update={"lengths_confidence": Confidence.NAME if sample else Confidence.GUESS})


def text_tokens(text: str) -> int:
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def _tokens(row: Row, columns: Sequence[str]) -> int:
    return sum(text_tokens(value) for key, value in row.items() if key in columns and isinstance(value, str))


def _answer(row: Row) -> int:
    """In a file whose columns have other names every text counts as one: their sum is what matters."""
    known = _tokens(row, ANSWERS)
    if known or any(key in PROMPTS for key in row):
        return known
    return sum(text_tokens(value) for value in row.values() if isinstance(value, str))


def _chat(row: Row) -> tuple[int, int]:
    """Tokens that are read, and tokens that are learned: the assistant's turns."""
    read = learned = 0
    messages: list[Any] = next((row[key] for key in MESSAGES if isinstance(row.get(key), list)), [])
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        role = str(message.get("from", message.get("role", "")))
        text = str(message.get("value", message.get("content", "")))
        if role in ASSISTANT:
            learned += text_tokens(text) + MESSAGE_TOKENS
        else:
            read += text_tokens(text) + MESSAGE_TOKENS
    return read, learned
