"""Chat rows as the evaluation encodes them: the task's template, loss on the assistant's turns and their end.

`chatml` is ours, `tokenizer_default` is the model's own; other templates are the installed Axolotl's, which
the evaluation uses as well.
"""

from __future__ import annotations

import importlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from core.domain.tasks import ChatDataset
from trainer.errors import BadData, BadModel
from trainer.inputs.files import RawRow, columns_of, require_columns, text_of
from trainer.inputs.tokens import BATCH, IGNORED, LabelledRow, Tokenizer, compact_ids, tokenized

CHATML = (
    "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_NAME = "chatml"
OWN_TEMPLATE = "tokenizer_default"
OWN_TEMPLATE_OR = "tokenizer_default_fallback_"


def template_of(name: str, tokenizer: Tokenizer) -> str:
    """The template's text. A fallback has none of its own: evaluation knows no template of such a name."""
    if name == OWN_TEMPLATE or name.startswith(OWN_TEMPLATE_OR):
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if isinstance(own, str) and own:
            return own
        if name == OWN_TEMPLATE:
            raise BadModel("the task names the tokenizer's own chat template, and the tokenizer has none")
        name = name.removeprefix(OWN_TEMPLATE_OR)
    if name == CHATML_NAME:
        return CHATML
    try:
        engine = importlib.import_module("axolotl.utils.chat_templates")
    except ImportError as error:
        raise BadData(f"{name[:100]!r} is Axolotl's chat template, which is not installed here") from error
    try:
        return str(engine.get_chat_template(name))
    except ValueError as error:
        raise BadData(f"{name[:100]!r} is no chat template that evaluation knows") from error


ASSISTANT, SYSTEM, USER = "assistant", "system", "user"
#: How far behind a turn's content its end token may stand.
PADDING = 3
#: Whatever a template does to an edge of the one, the other shows.
SENTINELS = ("[[dummy_message]]", "zzdummymessagezz")

Turn = dict[str, Any]
RenderTurns = Callable[[list[Turn]], str]


class LearnedSpan(NamedTuple):
    """A span of characters; empty when the content is not in the text."""

    start: int
    end: int


class RenderedChat(NamedTuple):
    text: str
    #: Of each turn that is learned.
    spans: tuple[LearnedSpan, ...]


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

    def turns(self, row: RawRow) -> list[Turn]:
        """The row's messages; those without role or content are left out, as in validators' own files."""
        messages = row.get(self.column)
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except (ValueError, RecursionError):
                return []
        if not isinstance(messages, list):
            return []
        turns_of_row = [turn for message in messages if (turn := self._turn(message)) is not None]
        if turns_of_row and turns_of_row[0]["role"] != SYSTEM and row.get(SYSTEM) is not None:
            turns_of_row.insert(0, {"role": SYSTEM, "content": text_of(row[SYSTEM])})
        return turns_of_row

    def _turn(self, message: Any) -> Turn | None:
        if not isinstance(message, dict):
            return None
        role, content = message.get(self._role), message.get(self._content)
        if role is None or content is None:
            return None
        known = {"role": self._roles.get(text_of(role), text_of(role)), "content": _content(content)}
        return {**self._more(message), **known}

    def _more(self, message: RawRow) -> Turn:
        """Further keys of a message that the template mentions, where the column is called `messages`."""
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

    def rendered(self, row: RawRow) -> RenderedChat | None:
        """The row as text; None for a row without a conversation, or one that the template refuses."""
        turns = self.turns(row)
        places = [place for place, turn in enumerate(turns) if turn["role"] == self._learned]
        if not places:
            return None
        try:
            text = self.render(turns)
            return RenderedChat(text, tuple(content_spans(self.render, turns, places, text)))
        except Exception:  # noqa: BLE001 - a template is a program: it refuses with whatever it meets
            return None


def _content(value: Any) -> str:
    """The text of a message; the texts of content in parts are joined."""
    if not isinstance(value, list):
        return text_of(value)
    parts = [part for part in value if isinstance(part, dict)]
    return "".join(text_of(part.get("text") or part.get("content") or part.get("value")) for part in parts)


def content_spans(
    render: RenderTurns, turns: list[Turn], places: Sequence[int], text: str
) -> list[LearnedSpan]:
    """Return the spans of these turns' contents in the text."""
    return _verbatim(render, turns, places, text) or [
        _changed(render, turns, place, text) for place in places
    ]


def _replaced(turns: list[Turn], contents: dict[int, str]) -> list[Turn]:
    return [{**turn, "content": contents.get(at, turn["content"])} for at, turn in enumerate(turns)]


def _verbatim(
    render: RenderTurns, turns: list[Turn], places: Sequence[int], text: str
) -> list[LearnedSpan] | None:
    """One more rendering for all turns together, where the template takes contents over as they are."""
    if not all(turns[place]["content"] for place in places):
        return None
    marks = {place: f"zq{number}qz{SENTINELS[1]}" for number, place in enumerate(places)}
    rest, pieces = render(_replaced(turns, marks)), []
    for mark in marks.values():
        before, separator, rest = rest.partition(mark)
        if not separator or mark in rest:
            return None
        pieces.append(before)
    spans, at = [], 0
    for piece, place in zip(pieces, places, strict=True):
        content = turns[place]["content"]
        if not text.startswith(piece + content, at):
            return None
        start = at + len(piece)
        at = start + len(content)
        spans.append(LearnedSpan(start, at))
    return spans if text[at:] == rest else None


def _changed(render: RenderTurns, turns: list[Turn], place: int, text: str) -> LearnedSpan:
    spans = [_difference(text, render(_replaced(turns, {place: mark}))) for mark in SENTINELS]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    return LearnedSpan(start, end) if end > start else LearnedSpan(0, 0)


def _difference(text: str, other: str) -> LearnedSpan:
    shorter = min(len(text), len(other))
    start = _alike(text, other, shorter)
    same = _alike(text[::-1], other[::-1], shorter - start)
    return LearnedSpan(start, len(text) - same)


def _alike(text: str, other: str, most: int) -> int:
    """The length of the common beginning, by bisection: comparing is fast, counting is not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[:middle] == other[:middle] else (low, middle - 1)
    return low


def chat_rows(dataset: ChatDataset, rows: list[RawRow], tokenizer: Tokenizer) -> Iterator[LabelledRow | None]:
    """Encode each row, in order; None for a row that is not a conversation with an assistant."""
    conversations = Conversations(dataset, tokenizer)
    require_columns(columns_of(rows), {"chat_column": conversations.column})
    for start in range(0, len(rows), BATCH):
        yield from _encoded([conversations.rendered(row) for row in rows[start : start + BATCH]], tokenizer)


def _encoded(batch: Sequence[RenderedChat | None], tokenizer: Tokenizer) -> Iterator[LabelledRow | None]:
    texts = [chat.text for chat in batch if chat is not None]
    if not texts:
        yield from (None for _ in batch)
        return
    encoding = tokenized(
        tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False
    )
    encoded = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    for chat in batch:
        if chat is None:
            yield None
        else:
            ids, offsets = next(encoded)
            yield LabelledRow(
                compact_ids(ids), compact_ids(labels(ids, offsets, chat.spans, tokenizer.eos_token_id))
            )


def labels(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[LearnedSpan],
    end_token: int | None,
) -> list[int]:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    marked = [IGNORED] * len(ids)
    for span in spans:
        # By the ends for the first token and by the starts for the last: one character may be several tokens.
        first, last = bisect_right(ends, span.start), bisect_left(starts, span.end)
        if span.end <= span.start or last <= first:
            if ids[-1] == end_token:
                continue
            # As Axolotl does for a turn that it cannot find: an end token is looked for at the beginning.
            first, last = 0, -1
        marked[first : max(last, first)] = ids[first : max(last, first)]
        for at in range(max(last, 0), min(last + PADDING + 1, len(ids))):
            if ids[at] == end_token:
                marked[at] = ids[at]
                break
    return marked
