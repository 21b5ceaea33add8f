"""Parsers with which the evaluator of environments finds tool calls in a model's answers."""

from __future__ import annotations

from enum import StrEnum


class ParserName(StrEnum):
    """Parsers of SGLang, by their names on its command line."""

    QWEN = "qwen25"
    HERMES = "hermes"
    LLAMA = "llama3"
    MISTRAL = "mistral"


#: What the evaluator looks for in a model's name, else in its `model_type`; the first that is there decides.
_PARSERS = (
    ("hermes", ParserName.HERMES),
    ("qwen", ParserName.QWEN),
    ("llama", ParserName.LLAMA),
    ("mixtral", ParserName.MISTRAL),
    ("mistral", ParserName.MISTRAL),
)


def parser_for(name: str, model_type: str = "") -> ParserName | None:
    """The parser that the evaluator starts its server with; without one no call is found in any answer."""
    for text in (name.lower(), model_type.lower()):
        for part, parser in _PARSERS:
            if part in text:
                return parser
    return None
