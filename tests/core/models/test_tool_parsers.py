"""Parsers of tool calls, as the evaluator chooses them."""

from __future__ import annotations

from core.models.tool_parsers import parser_for
from tests.doubles.each import each


@each(
    "name, model_type, parser",
    [
        ("Qwen2.5-3B-Instruct", "", "qwen25"),
        ("Hermes-3-Llama-3.1-8B", "llama", "hermes"),
        ("0123456789abcdef", "llama", "llama3"),
        ("0123456789abcdef", "mixtral", "mistral"),
        ("0123456789abcdef", "gpt_neox", None),
    ],
)
def test_the_parser_follows_from_the_name_then_the_type(
    name: str, model_type: str, parser: str | None
) -> None:
    assert parser_for(name, model_type) == parser
