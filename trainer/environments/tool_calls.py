"""Tool calls: how SGLang shows tools to a template and finds calls in a text, and what the evaluator reads.

SGLang is the evaluator's server, version 0.5.14. An answer is taken apart as its parsers do it, so that a
model that plays here plays there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.models.tool_parsers import ParserName, parser_for
from trainer.environments.memory import whole_number
from trainer.environments.prompts import GAME_ACTION

#: More characters than 512 tokens have. The time for finding thoughts grows with the square of the length.
_LONGEST_TEXT = 20_000
_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_OPEN_THOUGHT = re.compile(r"<think(?:ing)?>.*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model makes."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Its form in a message of a row, arguments as an object."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def parser_of_model(name: str, model_type: str) -> ParserName | None:
    """Choose by the type of a model in a directory before its name, which its owner chose."""
    if ParserName.HERMES in name.lower():
        return ParserName.HERMES
    return parser_for("", model_type) or parser_for(name)


def game_action(action: int) -> ToolCall:
    """The call that makes a move."""
    return ToolCall(GAME_ACTION, {"action_id": action})


def assistant_message(calls: Sequence[ToolCall], text: str | None = None) -> dict[str, Any]:
    """The answer of a row: text, or null, and calls.

    Without calls the key is left out, because some templates fail with an empty one."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [call.row() for call in calls]
    return message


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as the server hands them to the chat template.

    It parses each into a model of its own and dumps that: the description comes before the name, and two
    fields of its own follow. Templates print every key in its order."""
    return [
        {
            "type": "function",
            "function": {
                "description": tool["function"].get("description"),
                "name": tool["function"]["name"],
                "parameters": tool["function"].get("parameters"),
                "strict": False,
            },
            "defer_loading": None,
        }
        for tool in tools
    ]


def flat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the server tries next if a template fails with `template_tools`."""
    return [tool["function"] for tool in template_tools(tools)]


def without_thoughts(text: str) -> str:
    """Cut what stands in think tags, as the evaluator does, and whatever is longer than an answer can be."""
    # A lone surrogate, which JSON can write, cannot be encoded again.
    text = text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()
    text = _THOUGHT.sub("", text)
    for tag in ("</think>", "</thinking>"):
        text = text.rpartition(tag)[2]
    return _OPEN_THOUGHT.sub("", text).strip()


def read_arguments(text: str | None) -> dict[str, Any]:
    """A call's arguments; nothing from what is not a JSON object."""
    try:
        decoded = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return {}
    return {name: _argument(value) for name, value in decoded.items()} if isinstance(decoded, dict) else {}


def _argument(value: Any) -> Any:
    if isinstance(value, str):
        return without_thoughts(value)
    if value is None or isinstance(value, (int, float)):
        return value
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def first_move(calls: Iterable[ToolCall], legal: Sequence[int]) -> int | None:
    """The first `game_action` that names a legal action, whatever stands before and after it."""
    for call in calls:
        if call.name == GAME_ACTION:
            action = whole_number(call.arguments.get("action_id"))
            if action is not None and action in legal:
                return action
    return None


def find_calls(text: str, parser: ParserName | None, names: Iterable[str]) -> tuple[str, list[ToolCall]]:
    """Take an answer apart as the server does: its text, and the calls of tools that were offered."""
    if parser is None:
        return text, []
    rest, found = _FINDERS[parser](text)
    offered = set(names)
    calls = []
    for one in found:
        # Anything else than objects makes the server's parser fail, and the answer stays a text.
        if not isinstance(one, dict):
            return text, []
        name = one.get("name")
        if isinstance(name, str) and name in offered:
            arguments = one.get("parameters") or one.get("arguments", {})
            calls.append(ToolCall(name, read_arguments(json.dumps(arguments))))
    return rest, calls


def _each(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _find_qwen(text: str) -> tuple[str, list[Any]]:
    found = []
    for block in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL):
        try:
            found.append(json.loads(block.strip()))
        except (ValueError, RecursionError):
            continue
    start = text.find("<tool_call>\n")
    return (text if start < 0 else text[:start].strip()), _each(found)


def _find_hermes(text: str) -> tuple[str, list[Any]]:
    start = text.find("<tool_call>")
    if start < 0:
        return text, []
    try:
        blocks = re.findall(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", text, re.DOTALL)
        found = [json.loads((closed or cut).strip()) for closed, cut in blocks if closed or cut]
    except (ValueError, RecursionError):
        return text, []
    return text[:start].strip(), _each(found)


def _find_llama(text: str) -> tuple[str, list[Any]]:
    before, tag, after = text.partition("<|python_tag|>")
    if not tag:
        if not text.startswith("{"):
            return text, []
        before, after = "", text
    found, place, read = [], 0, 0
    while place < len(after):
        value, length = _next_object(after[place:])
        if length:
            found.append(value)
            # One character stands between two calls.
            place += length + 1
            read = place
        elif (place := after.find('{"name":', place + 1)) < 0:
            break
    return before + after[read:].strip(), found


def _next_object(text: str) -> tuple[Any, int]:
    """The value that a text begins with, in JSON or as Python writes it, and its length; 0 for none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        pass
    depth = 0
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "}" and depth == 0:
            try:
                value = ast.literal_eval(text[: place + 1].strip())
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                break
            return (value, place + 1) if isinstance(value, dict) else (None, 0)
    return None, 0


def _find_mistral(text: str) -> tuple[str, list[Any]]:
    start = text.find("[TOOL_CALLS")
    if start < 0:
        return text, []
    before, after = text[:start].strip(), text[start:]
    listed = after.find("[TOOL_CALLS] [")
    if listed >= 0:
        try:
            value, length = json.JSONDecoder().raw_decode(after[listed + len("[TOOL_CALLS] ") :])
        except (ValueError, RecursionError):
            return before, []
        rest = after[listed + len("[TOOL_CALLS] ") + length :].strip()
        return f"{before} {rest}".strip(), _each([value])
    found = []
    while begin := re.match(r"\[TOOL_CALLS\]?\s*([\w.-]+)\s*\[ARGS\]?\s*(?=\{)", after):
        try:
            arguments, length = json.JSONDecoder().raw_decode(after[begin.end() :])
        except (ValueError, RecursionError):
            break
        found.append({"name": begin[1], "arguments": arguments})
        after = after[begin.end() + length :].strip()
    return f"{before} {after}".strip() if found else before, found


_FINDERS: Mapping[ParserName, Callable[[str], tuple[str, list[Any]]]] = {
    ParserName.QWEN: _find_qwen,
    ParserName.HERMES: _find_hermes,
    ParserName.LLAMA: _find_llama,
    ParserName.MISTRAL: _find_mistral,
}
