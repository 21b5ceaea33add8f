"""Chat rows as evaluation encodes them: the task's template, loss on the assistant's turns and their end.

A conversation is rendered and encoded once. Where a turn's content lies in the text is found by rendering
with other contents in its place and looking at what changed, as Axolotl does: templates trim, split and
move contents, so searching for them would be wrong. The token that ends a turn is learned if it is the
tokenizer's end token and stands within three tokens after the content.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from core.tasks import ChatDataset
from trainer.inputs.files import Record, columns_of, need, text_of
from trainer.inputs.rows import IGNORED, LabelledRow, compact
from trainer.inputs.templates import template_of
from trainer.inputs.tokens import BATCH, Tokenizer

ASSISTANT, SYSTEM, USER = "assistant", "system", "user"
#: How far behind a turn's content its end token may stand.
PADDING = 3
#: Whatever a template does to an edge of the one, the other shows.
SENTINELS = ("[[dummy_message]]", "zzdummymessagezz")

Turn = dict[str, Any]
Render = Callable[[list[Turn]], str]


class Span(NamedTuple):
    """Of characters; empty when the content is not in the text."""

    start: int
    end: int


class Rendered(NamedTuple):
    text: str
    #: Of each turn that is learned.
    spans: tuple[Span, ...]


class Conversations:
    """A task's conversations as turns with the template's roles, and as text."""

    def __init__(self, dataset: ChatDataset, tokenizer: Tokenizer) -> None:
        self.column = dataset.chat_column or "conversations"
        self._role = dataset.chat_role_field or "from"
        self._content = dataset.chat_content_field or "value"
        roles = {dataset.chat_assistant_reference or ASSISTANT: ASSISTANT}
        self._roles = {**roles, dataset.chat_user_reference or USER: USER}
        #: The name under which turns are learned; a task may give "assistant" another meaning.
        self._learned = self._roles.get(ASSISTANT, ASSISTANT)
        self._tokenizer = tokenizer
        self._template = template_of(dataset.chat_template or "chatml", tokenizer)

    def turns(self, row: Record) -> list[Turn]:
        """Messages that lack a role or a content are left out, as in the files that validators prepare."""
        messages = row.get(self.column)
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except (ValueError, RecursionError):
                return []
        if not isinstance(messages, list):
            return []
        found = [turn for message in messages if (turn := self._turn(message)) is not None]
        if found and found[0]["role"] != SYSTEM and row.get(SYSTEM) is not None:
            found.insert(0, {"role": SYSTEM, "content": text_of(row[SYSTEM])})
        return found

    def _turn(self, message: Any) -> Turn | None:
        if not isinstance(message, dict):
            return None
        role, content = message.get(self._role), message.get(self._content)
        if role is None or content is None:
            return None
        known = {"role": self._roles.get(text_of(role), text_of(role)), "content": _content(content)}
        return {**self._more(message), **known}

    def _more(self, message: Record) -> Turn:
        """Of a column called as templates call it, what else the template speaks of goes along."""
        if self.column != "messages":
            return {}
        taken = {self._role, self._content, "role", "content"}
        return {
            key: value
            for key, value in message.items()
            if key not in taken and value is not None and re.search(rf"\b{re.escape(key)}\b", self._template)
        }

    def render(self, turns: list[Turn]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                turns, chat_template=self._template, tokenize=False, add_generation_prompt=False
            )
        )

    def rendered(self, row: Record) -> Rendered | None:
        """None for what is no conversation, or what the template refuses."""
        turns = self.turns(row)
        places = [place for place, turn in enumerate(turns) if turn["role"] == self._learned]
        if not places:
            return None
        try:
            text = self.render(turns)
            return Rendered(text, tuple(content_spans(self.render, turns, places, text)))
        except Exception:  # noqa: BLE001 - a template is a program: it refuses with whatever it meets
            return None


def _content(value: Any) -> str:
    """Content in parts is their texts in a row."""
    if not isinstance(value, list):
        return text_of(value)
    parts = [part for part in value if isinstance(part, dict)]
    return "".join(text_of(part.get("text") or part.get("content") or part.get("value")) for part in parts)


def content_spans(render: Render, turns: list[Turn], places: Sequence[int], text: str) -> list[Span]:
    """Where the contents of the turns at these places lie in the text."""
    return _verbatim(render, turns, places, text) or [
        _changed(render, turns, place, text) for place in places
    ]


def _replaced(turns: list[Turn], contents: dict[int, str]) -> list[Turn]:
    return [{**turn, "content": contents.get(at, turn["content"])} for at, turn in enumerate(turns)]


def _verbatim(render: Render, turns: list[Turn], places: Sequence[int], text: str) -> list[Span] | None:
    """One more rendering for all turns together, where the template takes contents over as they are."""
    if not all(turns[place]["content"] for place in places):
        return None
    marks = {place: f"zq{number}qz{SENTINELS[1]}" for number, place in enumerate(places)}
    rest, pieces = render(_replaced(turns, marks)), []
    for mark in marks.values():
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            return None
        pieces.append(before)
    spans, at = [], 0
    for piece, place in zip(pieces, places, strict=True):
        content = turns[place]["content"]
        if not text.startswith(piece + content, at):
            return None
        start = at + len(piece)
        at = start + len(content)
        spans.append(Span(start, at))
    return spans if text[at:] == rest else None


def _changed(render: Render, turns: list[Turn], place: int, text: str) -> Span:
    spans = [_difference(text, render(_replaced(turns, {place: mark}))) for mark in SENTINELS]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return Span(start, end) if end > start else Span(0, 0)


def _difference(text: str, other: str) -> Span:
    most = min(len(text), len(other))
    start = _alike(text, other, most)
    same = _alike(text[::-1], other[::-1], most - start)
    return Span(start, len(text) - same)


def _alike(one: str, other: str, most: int) -> int:
    """How many characters the two begin with in common, by halves: comparing is fast, counting is not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def chat_rows(dataset: ChatDataset, rows: list[Record], tokenizer: Tokenizer) -> Iterator[LabelledRow | None]:
    """One for each row, in order; None for what is no conversation with an assistant."""
    conversations = Conversations(dataset, tokenizer)
    need(columns_of(rows), {"chat_column": conversations.column})
    for start in range(0, len(rows), BATCH):
        yield from _encoded([conversations.rendered(row) for row in rows[start : start + BATCH]], tokenizer)


def _encoded(batch: Sequence[Rendered | None], tokenizer: Tokenizer) -> Iterator[LabelledRow | None]:
    texts = [one.text for one in batch if one is not None]
    if not texts:
        yield from (None for _ in batch)
        return
    found = tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    encoded = zip(found["input_ids"], found["offset_mapping"], strict=True)
    for one in batch:
        if one is None:
            yield None
        else:
            ids, offsets = next(encoded)
            yield LabelledRow(compact(ids), compact(labels(ids, offsets, one.spans, tokenizer.eos_token_id)))


def labels(
    ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span], end_token: int | None
) -> list[int]:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    found = [IGNORED] * len(ids)
    for span in spans:
        # By the ends for the first token and by the starts for the last: one character may be several tokens.
        first, last = bisect_right(ends, span.start), bisect_left(starts, span.end)
        if span.end <= span.start or last <= first:
            if ids[-1] == end_token:
                continue
            # As Axolotl does for a turn that it cannot find: an end token is looked for at the beginning.
            first, last = 0, -1
        found[first : max(last, first)] = ids[first : max(last, first)]
        for at in range(max(last, 0), min(last + PADDING + 1, len(ids))):
            if ids[at] == end_token:
                found[at] = ids[at]
                break
    return found
