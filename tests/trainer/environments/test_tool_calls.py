"""Tool calls are shown, found and read as the evaluator and its server do it."""

from __future__ import annotations

import json

from core.models.tool_parsers import ParserName
from tests.doubles.each import each
from trainer.environments import prompts
from trainer.environments.tool_calls import (
    ToolCall,
    assistant_message,
    find_calls,
    first_move,
    flat_tools,
    game_action,
    parser_of_model,
    read_arguments,
    template_tools,
    without_thoughts,
)

NAMES = [tool["function"]["name"] for tool in prompts.tools([1, 2])]
CALL = '{"name": "game_action", "arguments": {"action_id": 2}}'
NOTE = '{"name": "working_memory_append", "arguments": {"slot": 1, "content": "raises"}}'
QWEN_NOTE = f"<tool_call>\n{NOTE}\n</tool_call>"
MOVE = game_action(2)
NOTED = ToolCall("working_memory_append", {"slot": 1, "content": "raises"})


def test_the_template_gets_the_tools_as_the_server_dumps_them() -> None:
    tool = template_tools(prompts.tools([1, 2]))[4]
    dumped = (
        '{"type": "function", "function": {"description": "Commit your move and end your turn. Legal action '
        'ids: 1, 2.", "name": "game_action", "parameters": {"properties": {"action_id": {"description": "A '
        'legal action id for the current state.", "type": "integer", "enum": [1, 2]}}, "required": '
        '["action_id"], "type": "object"}, "strict": false}, "defer_loading": null}'
    )
    assert json.dumps(tool) == dumped
    assert flat_tools(prompts.tools([1, 2]))[4] == tool["function"]


@each(
    "parser, text, rest, calls",
    [
        ("qwen25", f"<tool_call>\n{CALL}\n</tool_call>", "", [MOVE]),
        ("qwen25", f"I see.\n{QWEN_NOTE}\n<tool_call>\n{CALL}\n</tool_call>", "I see.", [NOTED, MOVE]),
        ("qwen25", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
        ("qwen25", f"<tool_call>\n{CALL}", "", []),
        ("qwen25", f"<tool_call>\n{{broken\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", [MOVE]),
        ("qwen25", '<tool_call>\n{"name": "no_such", "arguments": {}}\n</tool_call>', "", []),
        ("qwen25", "<tool_call>\n7\n</tool_call>", "<tool_call>\n7\n</tool_call>", []),
        ("hermes", f"Hm <tool_call>{CALL}</tool_call>", "Hm", [MOVE]),
        ("hermes", f"<tool_call>{CALL}", "", [MOVE]),
        ("hermes", "<tool_call>{broken", "<tool_call>{broken", []),
        ("llama3", CALL.replace("arguments", "parameters"), "", [MOVE]),
        ("llama3", f"<|python_tag|>{NOTE};{CALL}", "", [NOTED, MOVE]),
        ("llama3", f"{NOTE}; {CALL}", "", [NOTED, MOVE]),
        ("llama3", f"Text first. {CALL}", f"Text first. {CALL}", []),
        ("llama3", "{'name': 'game_action', 'arguments': {'action_id': 2}}", "", [MOVE]),
        ("llama3", "{", "{", []),
        ("llama3", "{[1]}" + CALL, "", [MOVE]),
        ("mistral", f"[TOOL_CALLS] [{NOTE}, {CALL}]", "", [NOTED, MOVE]),
        ("mistral", '[TOOL_CALLS]game_action[ARGS]{"action_id": 2}', "", [MOVE]),
        ("mistral", "nothing", "nothing", []),
    ],
)  # fmt: skip
def test_calls_are_found_where_the_server_finds_them(
    parser: str, text: str, rest: str, calls: list[ToolCall]
) -> None:
    assert find_calls(text, ParserName(parser), NAMES) == (rest, calls)


def test_without_a_parser_there_are_no_calls() -> None:
    assert find_calls(CALL, None, NAMES) == (CALL, [])


@each(
    "arguments, action",
    [
        ({"action_id": 2}, 2),
        ({"action_id": " 2 "}, 2),
        ({"action_id": 2.0}, None),
        ({"action_id": True}, None),
        ({"action_id": "two"}, None),
        ({"action_id": 3}, None),
        ({}, None),
    ],
)
def test_a_move_is_a_whole_number_of_a_legal_action(arguments: dict[str, object], action: int | None) -> None:
    assert first_move([ToolCall("game_action", arguments)], [1, 2]) == action


def test_the_first_legal_move_counts() -> None:
    calls = [NOTED, game_action(9), game_action(2), game_action(1)]
    assert first_move(calls, [1, 2]) == 2


@each(
    "text, arguments",
    [
        ('{"slot": 1, "content": "<think>no</think>yes"}', {"slot": 1, "content": "yes"}),
        ('{"content": {"b": 1, "a": [2]}}', {"content": '{"a":[2],"b":1}'}),
        ("[1]", {}),
        ("{", {}),
        (None, {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_are_read_as_the_evaluator_reads_them(
    text: str | None, arguments: dict[str, object]
) -> None:
    assert read_arguments(text) == arguments


@each(
    "text, rest",
    [("<think>a</think> b", "b"), ("a</think>b", "b"), ("b<thinking>a", "b"), ("plain", "plain")],
)
def test_thoughts_are_cut(text: str, rest: str) -> None:
    assert without_thoughts(text) == rest


@each(
    "name, model_type, parser",
    [
        ("my-qwen-distill", "llama", "llama3"),
        ("Hermes-3-Llama-3.1-8B", "llama", "hermes"),
        ("base", "qwen3", "qwen25"),
        ("Mistral-7B", "unheard_of", "mistral"),
        ("base", "gpt_neox", None),
    ],
)
def test_in_a_directory_the_type_decides_before_its_name(
    name: str, model_type: str, parser: str | None
) -> None:
    assert parser_of_model(name, model_type) == parser


def test_thoughts_without_end_are_searched_for_in_no_more_than_an_answer() -> None:
    assert without_thoughts("<think>" * 2_000_000) == ""


def test_an_answer_without_calls_has_no_key_for_them() -> None:
    assert assistant_message([], "text") == {"role": "assistant", "content": "text"}
    (call,) = assistant_message([MOVE])["tool_calls"]
    assert call == {"type": "function", "function": {"name": "game_action", "arguments": {"action_id": 2}}}
