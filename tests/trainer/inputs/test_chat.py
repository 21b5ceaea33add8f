"""Conversations: turns, where their contents lie in a text, and what of it is learned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.tasks import ChatDataset
from tests.doubles.each import each
from tests.trainer.words import WordTokenizer
from trainer.errors import BadData, BadModel
from trainer.inputs.chat import (
    CHATML,
    Conversations,
    LearnedSpan,
    Turn,
    chat_rows,
    content_spans,
    labels,
    template_of,
)
from trainer.inputs.tokens import IGNORED, LabelledRow

TASK = ChatDataset(chat_user_reference="human", chat_assistant_reference="gpt")


def said(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def one(row: dict[str, Any]) -> tuple[WordTokenizer, LabelledRow | None]:
    tokenizer = WordTokenizer()
    return tokenizer, next(iter(chat_rows(TASK, [row], tokenizer)))


def taught(row: dict[str, Any]) -> str | None:
    tokenizer, labelled = one(row)
    return (
        None
        if labelled is None
        else tokenizer.decode([label for label in labelled.labels if label != IGNORED])
    )


def test_the_assistants_turns_and_their_ends_are_learned_and_nothing_else() -> None:
    assert taught(said(("human", "hi"), ("gpt", "hello you"), ("human", "bye"), ("gpt", "see you"))) == (
        "hello you<end>see you<end>"
    )


def test_a_text_that_is_said_twice_is_learned_where_the_assistant_says_it() -> None:
    tokenizer, row = one(said(("human", "same"), ("gpt", "same")))
    assert row is not None
    places = [at for at, label in enumerate(row.labels) if label != IGNORED]
    assert tokenizer.decode(row.ids[: places[0]]).endswith("[assistant]")


def test_unknown_roles_keep_their_names_and_are_not_learned() -> None:
    assert taught(said(("human", "a"), ("tool", "b"), ("gpt", "c"))) == "c<end>"


def test_a_role_called_assistant_is_learned_whatever_the_task_calls_it() -> None:
    assert taught(said(("human", "a"), ("assistant", "b"))) == "b<end>"


@each(
    "row",
    [
        said(("human", "no answer")),
        said(("system", "be kind"), ("user", "hello")),
        said(("human", "a"), ("gpt", "refuse")),
        {"conversations": []},
        {"conversations": None},
        {"conversations": "no json"},
        {"conversations": "{}"},
        {"conversations": [1, "x", None, {"from": "gpt"}, {"value": "y"}]},
    ],
)
def test_what_is_no_conversation_with_an_assistant_has_no_row(row: dict[str, Any]) -> None:
    assert one(row)[1] is None


def test_a_conversation_may_be_written_as_json() -> None:
    assert (
        taught({"conversations": '[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]'})
        == "b<end>"
    )


def test_content_in_parts_is_their_texts() -> None:
    row = {
        "conversations": [{"from": "gpt", "value": [{"text": "a "}, {"content": "b"}, "c", {"value": " d"}]}]
    }
    assert taught(row) == "a b d<end>"


def test_a_system_column_becomes_the_first_turn_unless_there_is_one() -> None:
    conversations = Conversations(TASK, WordTokenizer())
    row = {**said(("human", "a"), ("gpt", "b")), "system": "be kind"}
    assert conversations.turns(row)[0] == {"role": "system", "content": "be kind"}
    own = {**said(("system", "own"), ("gpt", "b")), "system": "other"}
    assert [turn["content"] for turn in conversations.turns(own)] == ["own", "b"]


def test_a_wrong_column_is_named() -> None:
    with pytest.raises(BadData, match="chat_column 'conversations'"):
        list(chat_rows(TASK, [{"messages": []}], WordTokenizer()))


def plain(turns: list[Turn]) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in turns)


def trimming(turns: list[Turn]) -> str:
    return "".join(f"<{turn['role']}>{turn['content'].strip()}</>" for turn in turns)


CONTENTS = st.lists(st.text(alphabet="ab [z]<>/\n", max_size=12), min_size=1, max_size=4)


@given(CONTENTS)
def test_contents_that_are_taken_over_are_found_exactly(contents: list[str]) -> None:
    turns = [{"role": "r", "content": content} for content in contents]
    text = plain(turns)
    spans = content_spans(plain, turns, range(len(turns)), text)
    for content, span in zip(contents, spans, strict=True):
        if content:
            assert text[span.start : span.end] == content


@given(CONTENTS)
def test_contents_that_a_template_trims_are_found_as_it_left_them(contents: list[str]) -> None:
    turns = [{"role": "r", "content": content} for content in contents]
    text = trimming(turns)
    for content, span in zip(contents, content_spans(trimming, turns, range(len(turns)), text), strict=True):
        if content.strip():
            assert text[span.start : span.end].startswith(content.strip()[:1]) or content.strip() in text
            assert content.strip() in text[max(span.start - 1, 0) : span.end + 1]


def test_the_end_of_a_turn_is_learned_only_close_behind_it() -> None:
    ids, offsets = [5, 6, 7, 8, 9, 2], [(at, at + 1) for at in range(6)]
    assert labels(ids, offsets, [LearnedSpan(1, 3)], 2) == [IGNORED, 6, 7, IGNORED, IGNORED, 2]
    assert labels(ids, offsets, [LearnedSpan(0, 1)], 2) == [5, *[IGNORED] * 5]


def test_a_turn_that_is_not_in_the_text_teaches_no_content() -> None:
    ids, offsets = [5, 6, 7, 8], [(at, at + 1) for at in range(4)]
    assert labels(ids, offsets, [LearnedSpan(0, 0)], 99) == [IGNORED] * 4


def test_templates_are_known_by_the_names_of_tasks() -> None:
    tokenizer: Any = WordTokenizer()
    assert template_of("chatml", tokenizer) == CHATML
    with pytest.raises(BadModel, match="has none"):
        template_of("tokenizer_default", tokenizer)
    assert template_of("tokenizer_default_fallback_chatml", tokenizer) == CHATML
    tokenizer.chat_template = {"default": "own", "tools": "other"}
    assert template_of("tokenizer_default", tokenizer) == "own"
    tokenizer.chat_template = None
    for name in ("no such template", "tokenizer_default_fallback_" * 3000 + "chatml"):
        with pytest.raises(BadData):
            template_of(name, tokenizer)
