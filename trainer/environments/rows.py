"""Rows of an environment task: one request as the evaluator makes it, and the answer that is learned.

A row is an object with `messages`, `tools` and the name of its `environment`. Its prompt is encoded as the
request is, up to where the model begins to write; what follows is encoded apart, so no token lies across the
border. Learned are the assistant's turns with the token that ends them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from typing import Any, NamedTuple

from core.models.tool_parsers import ParserName
from trainer.errors import BadModel
from trainer.inputs.files import RawRow
from trainer.inputs.tokens import IGNORED, LabelledRow, Tokenizer, compact_ids, encode

Message = dict[str, Any]
#: Rows that are encoded by one worker at a time, and how many make a second worker worth its start.
_CHUNK, _WORTH_A_POOL = 256, 4 * 256
_ANSWER = "An answer."


class CallForm(StrEnum):
    """The way in which the model's template writes calls."""

    #: As the evaluator's parser reads them, several in one turn included.
    NATIVE = "native"
    #: One call in a turn: the last, which is the move.
    ONE_CALL = "one call"
    #: Not at all: they are written as text.
    WRITTEN = "written"


class RowEncoder(NamedTuple):
    """The model's tokenizer and the form of calls that its template takes."""

    tokenizer: Tokenizer
    form: CallForm = CallForm.NATIVE
    #: What finds calls in the model's answers when it is evaluated.
    parser: ParserName | None = None
    #: Whether the template gets tools without what stands around a function, as the server tries next.
    flat: bool = False
    #: What the template writes at the end of a turn; empty: the tokenizer's end token.
    end: str = ""

    def messages(self, row: RawRow) -> list[Message]:
        """The row's messages in this form. An empty `tool_calls` ends some templates, so there is none."""
        messages = []
        for message in row["messages"]:
            calls = self.calls(message)
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            if calls and self.form is CallForm.WRITTEN:
                written = [_written(call, self.parser) for call in calls]
                plain["content"] = "\n".join(filter(None, (plain.get("content"), *written)))
            elif calls:
                # Some templates want an identifier, of nine characters.
                numbered = enumerate(calls, 1)
                plain["tool_calls"] = [{"id": f"call{number:05d}", **call} for number, call in numbered]
            messages.append(plain)
        return messages

    def calls(self, message: Message) -> list[dict[str, Any]]:
        """Those of a message that this form keeps: the last is the move."""
        calls = list(message.get("tool_calls") or ())
        alone = self.form is CallForm.ONE_CALL or self.parser is ParserName.LLAMA
        return calls[-1:] if alone and self.form is not CallForm.NATIVE else calls

    def tools(self, row: RawRow) -> list[dict[str, Any]] | None:
        """Return the tools as the template gets them, or None if the row has none."""
        tools = row.get("tools")
        listed = json.loads(tools) if isinstance(tools, str) and tools else tools
        return [tool["function"] for tool in listed] if listed and self.flat else listed or None

    def render(self, messages: Sequence[Message], tools: Any, *, asks: bool) -> str:
        """Render messages as text; `asks` ends where the model begins to write."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=asks
            )
        )

    def turns(self, row: RawRow) -> list[tuple[str, str]]:
        """Return what is read and what is learned, turn by turn. Raise `BadModel` if the template changes
        what was read before once an answer is there: then the training's prompts would not be the
        evaluator's."""
        messages, tools = self.messages(row), self.tools(row)
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        turns, done = [], ""
        for place in places:
            asked = self.render(messages[:place], tools, asks=True)
            answered = self.render(messages[: place + 1], tools, asks=False)
            if not asked.startswith(done):
                return self._turns_of_whole(messages, tools, places)
            if not answered.startswith(asked):
                raise BadModel("the chat template writes a request in another way once it is answered")
            answer = self._ended(answered[len(asked) :])
            turns.append((asked[len(done) :], answer))
            done = asked + answer
        return self._closed(turns)

    def _turns_of_whole(
        self, messages: Sequence[Message], tools: Any, places: Sequence[int]
    ) -> list[tuple[str, str]]:
        """Encode all of the conversation as the last request has it: for templates that write old answers
        otherwise than the last, such as those that drop old thoughts."""
        whole, first = self.render(messages, tools, asks=False), messages[: places[0]]
        asks = self.render(first, tools, asks=True).removeprefix(self.render(first, tools, asks=False))
        asks, _, _ = asks.partition("<think>")
        end = self._turn_end
        turns, rest = [], whole
        for _ in places:
            read, found, rest = rest.partition(asks)
            answer, ended, rest = rest.partition(end)
            if not (asks and end and found and ended):
                raise BadModel("the chat template writes a request in another way once it is answered")
            turns.append((read + found, answer + ended))
        return self._closed(turns)

    @property
    def _turn_end(self) -> str:
        return self.end or self.tokenizer.eos_token or ""

    def _ended(self, answer: str) -> str:
        """Up to what ends the turn: nothing after that is ever generated."""
        end = self._turn_end
        before, found, _ = answer.rpartition(end) if end else (answer, "", "")
        return before + end if found else answer.rstrip() + end

    def _closed(self, turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The last turn ends with the tokenizer's end token too, where a turn's end is another one: servers
        stop there. Earlier turns are what the next request shows of them."""
        eos = self.tokenizer.eos_token or ""
        if turns and not turns[-1][1].endswith(eos):
            turns[-1] = (turns[-1][0], turns[-1][1] + eos)
        return turns

    def said(self, learned: str) -> str:
        """A learned turn without what ends it."""
        eos = self.tokenizer.eos_token or ""
        return learned.removesuffix(eos).removesuffix(self._turn_end).strip()

    def encode(self, rows: Sequence[RawRow]) -> Iterator[LabelledRow | None]:
        """In order; None for a row that the template refuses."""
        rendered = [self._turns_or_none(row) for row in rows]
        texts = [text for turns in rendered for turn in turns or () for text in turn]
        encoded = encode(self.tokenizer, texts, special_tokens=False)
        for turns in rendered:
            ids: list[int] = []
            labels: list[int] = []
            for _ in turns or ():
                read, learned = next(encoded), next(encoded)
                ids += [*read, *learned]
                labels += [*[IGNORED] * len(read), *learned]
            yield LabelledRow(compact_ids(ids), compact_ids(labels)) if turns else None

    def _turns_or_none(self, row: RawRow) -> list[tuple[str, str]] | None:
        try:
            return self.turns(row)
        except Exception:  # noqa: BLE001 - a template is a program: it refuses with whatever it meets
            return None


def turn_end(tokenizer: Tokenizer) -> str:
    """Return what the template writes after an answer; empty if it writes nothing or fails."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program: it fails with whatever it meets
        return ""
    _, found, end = text.rpartition(_ANSWER)
    return end.strip() if found else ""


def _written(call: Mapping[str, Any], parser: ParserName | None) -> str:
    """A call as the parser reads it from plain text."""
    function = call["function"]
    key = "parameters" if parser is ParserName.LLAMA else "arguments"
    text = json.dumps({"name": function["name"], key: function["arguments"]}, ensure_ascii=False)
    if parser is ParserName.LLAMA:
        return text
    return f"[TOOL_CALLS] [{text}]" if parser is ParserName.MISTRAL else f"<tool_call>\n{text}\n</tool_call>"


_encoder: RowEncoder | None = None


def _encode_chunk(rows: list[RawRow]) -> list[LabelledRow | None]:
    assert _encoder is not None
    return list(_encoder.encode(rows))


def encode_rows(encoder: RowEncoder, rows: Sequence[RawRow], cores: int = 1) -> Iterator[LabelledRow | None]:
    """In order. Templates are slow, a millisecond a row and more, so large tasks take all cores."""
    if cores < 2 or len(rows) < _WORTH_A_POOL:
        yield from encoder.encode(rows)
        return
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chunks = [list(rows[start : start + _CHUNK]) for start in range(0, len(rows), _CHUNK)]
    try:
        with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
            for encoded in pool.map(_encode_chunk, chunks):
                yield from encoded
    finally:
        _encoder = None
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
