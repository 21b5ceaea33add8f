"""A tokenizer of words for the tests that need none of the training stack: enough of one to encode with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

BEGIN, END, PAD = 1, 2, 0
SPECIAL = {"<begin>": BEGIN, "<end>": END, "<pad>": PAD}


class WordTokenizer:
    """A token is a word with the blank before it, a single character of anything else, or a marker."""

    bos_token_id, eos_token_id, pad_token_id = BEGIN, END, PAD
    bos_token, eos_token, pad_token = "<begin>", "<end>", "<pad>"
    is_fast = True
    chat_template = None

    def __init__(self, *, adds_begin: bool = False) -> None:
        self._ids: dict[str, int] = dict(SPECIAL)
        self._begin = [BEGIN] if adds_begin else []

    def _pieces(self, text: str) -> Iterator[re.Match[str]]:
        return re.finditer(r"<begin>|<end>|<pad>| ?\w+|[^\w]", text)

    def _one(self, text: str, special: bool, limit: int | None) -> tuple[list[int], list[tuple[int, int]]]:
        pieces = list(self._pieces(text))
        ids = [self._ids.setdefault(piece.group(), len(self._ids)) for piece in pieces]
        begin = self._begin if special else []
        offsets = [(0, 0)] * len(begin) + [piece.span() for piece in pieces]
        return ([*begin, *ids])[:limit], offsets[:limit]

    def __call__(self, text: Any, **options: Any) -> dict[str, Any]:
        limit = options.get("max_length") if options.get("truncation") else None
        texts = [text] if isinstance(text, str) else text
        encoded = [self._one(one, options.get("add_special_tokens", True), limit) for one in texts]
        ids, offsets = [one[0] for one in encoded], [one[1] for one in encoded]
        if isinstance(text, str):
            return {"input_ids": ids[0], "offset_mapping": offsets[0]}
        return {"input_ids": ids, "offset_mapping": offsets}

    def decode(self, ids: Any) -> str:
        names = {number: text for text, number in self._ids.items()}
        return "".join(names[one] for one in ids)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """Not the template's text but a fixed one; contents that say so are refused."""
        if any("refuse" in turn["content"] for turn in conversation):
            raise ValueError("the template refuses this")
        return "".join(f"[{turn['role']}]{turn['content']}<end>\n" for turn in conversation)
