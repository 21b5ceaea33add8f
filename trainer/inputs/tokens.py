"""The base model's tokenizer, and the ways in which evaluation encodes with it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import BadModel

#: Texts encoded in one call: enough for the tokenizer's threads, few enough for their offsets in memory.
BATCH = 1000


class Tokenizer(Protocol):
    """What we need of a tokenizer of transformers."""

    bos_token_id: int | None
    eos_token_id: int | None
    eos_token: str | None
    pad_token_id: int | None
    pad_token: str | None
    chat_template: Any
    is_fast: bool

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def __len__(self) -> int: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def load_tokenizer(model_path: str) -> Tokenizer:
    """As evaluation loads it: the base model's, no foreign code, padded with the end token if need be."""
    transformers = importlib.import_module("transformers")
    try:
        tokenizer: Tokenizer = transformers.AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # a foreign folder makes transformers raise what it likes
        raise BadModel(f"{model_path} has no tokenizer that can be loaded: {str(error)[:300]}") from error
    if tokenizer.eos_token_id is None:
        raise BadModel(f"the tokenizer in {model_path} has no end token, which every answer is to end with")
    if not tokenizer.is_fast:
        raise BadModel(
            f"the tokenizer in {model_path} cannot tell where its tokens lie in the text (not fast)"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def pad_token_for_engine(tokenizer: Tokenizer) -> str | None:
    """`RunInputs.pad_token`: the token to pad with, where the tokenizer has none of its own."""
    return tokenizer.pad_token if tokenizer.pad_token_id == tokenizer.eos_token_id else None


def model_window(model_path: str) -> int | None:
    """`max_position_embeddings` of the model's own configuration; text parts of larger models included."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{model_path} has no config.json that can be read: {error}") from error
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        window = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(window, int) and window > 0:
            return window
    return None


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool = True, limit: int | None = None
) -> Iterator[list[int]]:
    """Each text by itself; longer ones are cut at `limit` tokens, special ones counted."""
    options: dict[str, Any] = {"add_special_tokens": special_tokens, "return_attention_mask": False}
    if limit is not None:
        options |= {"truncation": True, "max_length": limit}
    for start in range(0, len(texts), BATCH):
        yield from tokenizer(list(texts[start : start + BATCH]), **options)["input_ids"]


def encode_filled(tokenizer: Tokenizer, texts: Sequence[str], limit: int | None) -> Iterator[list[int]]:
    """The same, but an empty text is no tokens, not even special ones."""
    filled = encode(tokenizer, [text for text in texts if text], limit=limit)
    yield from (next(filled) if text else [] for text in texts)
