"""A row of a text task as its evaluation reads it: what is read, what is learned, what is the other answer.

The columns are those that the request names; where it names none, those of validators' files. This is for
facts and checks: lengths leave formats out, which add a few tokens. The trainer builds the exact texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from core.data import DatasetFacts
from core.data_facts import facts_from_lengths
from core.facts import Confidence
from core.row_facts import MESSAGE_TOKENS, text_tokens
from core.tasks import TASK_TYPE_OF, ChatDataset, DatasetType, DpoDataset, GrpoDataset, InstructDataset

Row = Mapping[str, Any]
#: How many tokens each of these texts has.
Count = Callable[[Sequence[str]], Sequence[int]]


class Parts(NamedTuple):
    """The texts of one row. Markup around messages is counted, not written out."""

    read: tuple[str, ...]
    learned: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    read_messages: int = 0
    learned_messages: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.read, *self.learned, *self.rejected)


class RowReader:
    """Reads rows of one task."""

    def __init__(self, dataset: DatasetType) -> None:
        self.dataset = dataset
        #: The request's key → the column that must be there.
        self.needed = needed_columns(dataset)
        self._parts = _reader_of(dataset)

    def parts(self, row: Row) -> Parts:
        return self._parts(row)

    def can_be_learned(self, parts: Parts) -> bool:
        """Rows without a label are dropped by evaluation and engines alike."""
        if isinstance(self.dataset, DpoDataset):
            return all(map(_filled, (parts.read, parts.learned, parts.rejected)))
        return _filled(parts.read if isinstance(self.dataset, GrpoDataset) else parts.learned)


def needed_columns(dataset: DatasetType) -> dict[str, str]:
    """Without these there is nothing to learn. What else a request names may be missing."""
    if isinstance(dataset, InstructDataset):
        named = {"field_instruction": dataset.field_instruction, "field_output": dataset.field_output}
        return {key: name for key, name in named.items() if name}
    if isinstance(dataset, ChatDataset):
        return {"chat_column": dataset.chat_column or "conversations"}
    if isinstance(dataset, DpoDataset):
        return {
            "field_prompt": dataset.field_prompt or "prompt",
            "field_chosen": dataset.field_chosen or "chosen",
            "field_rejected": dataset.field_rejected or "rejected",
        }
    if isinstance(dataset, GrpoDataset):
        return {"field_prompt": dataset.field_prompt or "prompt"}
    return {}


def standard_name(key: str) -> str | None:
    """The name that a column has in validators' files whatever the request calls it."""
    return "prompt" if key == "field_prompt" else None


def facts_from_parts(
    dataset: DatasetType, sample: Sequence[Parts], rows: int, count: Count | None = None
) -> DatasetFacts:
    """From a sample of a file with `rows` usable rows. Without a tokenizer to count, lengths are by bytes."""
    texts = [text for parts in sample for text in parts.texts]
    counted = iter(count(texts) if count else map(text_tokens, texts))
    lengths = [_lengths(parts, counted) for parts in sample]
    pairs = isinstance(dataset, DpoDataset)
    facts = facts_from_lengths(
        TASK_TYPE_OF[dataset.kind],
        [one[0] for one in lengths],
        [one[1] for one in lengths],
        [one[2] for one in lengths] if pairs else None,
        rows,
    )
    if count or not sample:
        return facts
    return facts.model_copy(update={"lengths_confidence": Confidence.NAME})


def _lengths(parts: Parts, counted: Any) -> tuple[int, int, int]:
    read, learned, rejected = (
        sum(next(counted) for _ in texts) for texts in (parts.read, parts.learned, parts.rejected)
    )
    return (
        read + MESSAGE_TOKENS * parts.read_messages,
        learned + MESSAGE_TOKENS * parts.learned_messages,
        rejected,
    )


def _filled(texts: Sequence[str]) -> bool:
    return any(text and not text.isspace() for text in texts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _reader_of(dataset: DatasetType) -> Callable[[Row], Parts]:
    if isinstance(dataset, InstructDataset):
        return _instruct(dataset)
    if isinstance(dataset, ChatDataset):
        return _chat(dataset)
    names = tuple(needed_columns(dataset).values())
    if isinstance(dataset, DpoDataset):
        prompt, chosen, rejected = names
        return lambda row: Parts(
            (_text(row.get(prompt)),), (_text(row.get(chosen)),), (_text(row.get(rejected)),)
        )
    if isinstance(dataset, GrpoDataset):
        return lambda row: Parts((_text(row.get(names[0], row.get("prompt"))),))
    raise ValueError(f"{dataset.kind} tasks have no rows")


def _instruct(dataset: InstructDataset) -> Callable[[Row], Parts]:
    asked, answer = dataset.field_instruction or "", dataset.field_output
    given, system = dataset.field_input, dataset.field_system or "system"
    prompt = dataset.system_prompt or ""

    def parts(row: Row) -> Parts:
        if answer is None:  # all of it is learned
            return Parts((), (_text(row.get(asked)),))
        before = _text(row[system]) if system in row else prompt
        read = (before, _text(row.get(asked)), _text(row.get(given)) if given else "")
        return Parts(tuple(filter(None, read)), (_text(row.get(answer)),))

    return parts


def _chat(dataset: ChatDataset) -> Callable[[Row], Parts]:
    column = dataset.chat_column or "conversations"
    role, content = dataset.chat_role_field or "from", dataset.chat_content_field or "value"
    assistant = dataset.chat_assistant_reference or "assistant"

    def parts(row: Row) -> Parts:
        read: list[str] = []
        learned: list[str] = []
        for message in _messages(row.get(column)):
            if isinstance(message, Mapping) and message.get(content) is not None:
                (learned if message.get(role) == assistant else read).append(_text(message[content]))
        return Parts(tuple(read), tuple(learned), (), len(read), len(learned))

    return parts


def _messages(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, list) else ()
