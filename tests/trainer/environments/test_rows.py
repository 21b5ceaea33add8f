"""Rows in tokens: the request as the evaluator's server encodes it, then what is learned."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pyspiel")
pytest.importorskip("axolotl")

from core.models.tool_parsers import ParserName
from tests.trainer.environments import models
from trainer.environments.rows import CallForm, RowEncoder, encode_rows
from trainer.environments.selfplay import GameSource
from trainer.environments.tool_calls import find_calls
from trainer.errors import BadModel
from trainer.inputs.tokens import IGNORED

TEMPLATES = {
    "qwen_25": (CallForm.NATIVE, ParserName.QWEN),
    "qwen3": (CallForm.NATIVE, ParserName.QWEN),
    "llama3_2_vision": (CallForm.ONE_CALL, ParserName.LLAMA),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    source = GameSource("leduc_poker")
    source.get_ready()
    return [{"environment": source.name, **row} for seed in range(40) for row in source.rows(seed)]


def encoder(template: str) -> RowEncoder:
    form, parser = TEMPLATES[template]
    return RowEncoder(models.tokenizer(template), form, parser)


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_read_is_the_evaluators_request_token_by_token(
    template: str, rows: list[dict[str, Any]]
) -> None:
    ours = encoder(template)
    for row, encoded in zip(rows, ours.encode(rows), strict=True):
        assert encoded is not None
        request = ours.tokenizer.apply_chat_template(
            row["messages"][:2], tools=json.loads(row["tools"]), add_generation_prompt=True, tokenize=True
        )["input_ids"]
        learned = [place for place, label in enumerate(encoded.labels) if label != IGNORED]
        assert list(encoded.ids[: learned[0]]) == request
        assert learned == list(range(learned[0], len(encoded.ids)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_learned_is_the_call_and_the_end(template: str, rows: list[dict[str, Any]]) -> None:
    ours = encoder(template)
    for row, encoded in zip(rows, ours.encode(rows), strict=True):
        assert encoded is not None
        ids = [label for label in encoded.labels if label != IGNORED]
        assert ids.pop() == ours.tokenizer.eos_token_id
        meant = [call["function"] for call in row["messages"][-1]["tool_calls"]]
        names = [tool["function"]["name"] for tool in json.loads(row["tools"])]
        text = ours.tokenizer.decode(ids).replace("<|eot_id|>", "").removeprefix("</think>").strip()
        _, calls = find_calls(text, ours.parser, names)
        assert [(call.name, dict(call.arguments)) for call in calls] == [
            (one["name"], one["arguments"]) for one in meant
        ]


def test_each_answer_of_a_conversation_is_learned_and_nothing_else() -> None:
    messages = [
        {"role": "system", "content": "mend it"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "look\n```bash\nls\n```"},
        {"role": "user", "content": "a.py"},
        {"role": "assistant", "content": "done"},
    ]
    ours = encoder("qwen_25")
    [encoded] = ours.encode([{"environment": "swe_infinite", "messages": messages, "tools": None}])
    assert encoded is not None
    whole = ours.render(messages, None, asks=False)
    assert ours.tokenizer.decode(encoded.ids) == whole.rstrip("\n")
    learned = [label for label in encoded.labels if label != IGNORED]
    assert ours.tokenizer.decode(learned) == "look\n```bash\nls\n```<|im_end|>done<|im_end|>"


def test_old_answers_are_learned_as_the_last_request_shows_them() -> None:
    """Templates of models that think drop old thoughts, and put an empty one before the last answer."""
    turns = [("user", "go on"), ("assistant", "first"), ("user", "and"), ("assistant", "second")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ours = encoder("qwen3")
    [encoded] = ours.encode([{"environment": "swe_infinite", "messages": messages, "tools": None}])
    assert encoded is not None
    assert ours.tokenizer.decode(encoded.ids) == ours.render(messages, None, asks=False).rstrip("\n")
    learned = ours.tokenizer.decode([label for label in encoded.labels if label != IGNORED])
    assert learned.replace("<think>\n\n</think>\n\n", "") == "first<|im_end|>second<|im_end|>"


def test_many_rows_are_encoded_by_several_workers_in_their_order() -> None:
    ours = encoder("qwen_25")
    several = [
        {"messages": [{"role": "user", "content": f"{at}"}, {"role": "assistant", "content": f"{at}!"}]}
        for at in range(1100)
    ]
    assert list(encode_rows(ours, several, cores=2)) == list(encode_rows(ours, several, cores=1))


def test_a_row_that_the_template_refuses_is_none_and_others_are_kept(rows: list[dict[str, Any]]) -> None:
    ours = RowEncoder(models.tokenizer("llama3_2_vision"))
    two = [{**rows[0]["messages"][-1]["tool_calls"][0]}] * 2
    refused = {
        **rows[0],
        "messages": [*rows[0]["messages"][:2], {**rows[0]["messages"][2], "tool_calls": two}],
    }
    first, second = ours.encode([refused, rows[1]])
    assert first is None
    assert second is not None


def test_a_template_that_rewrites_the_request_is_no_template_for_rows() -> None:
    words = models.tokenizer()
    words.chat_template = (
        "{{ messages | length }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(BadModel, match="in another way"):
        RowEncoder(words).turns(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        )
