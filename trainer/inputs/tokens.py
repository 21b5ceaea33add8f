"""The base model's tokenizer, how the evaluation encodes with it, and the rows that result."""

from __future__ import annotations

import importlib
import json
import logging
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from core.submission.metadata import vocabulary_rows
from trainer.errors import BadModel
from trainer.inputs.model_loading import forbid_remote_code

log = logging.getLogger(__name__)

#: What families call it in their configurations, the usual name first.
WINDOW_NAMES = ("max_position_embeddings", "n_positions")
#: Texts encoded in one call: enough for the tokenizer's threads, few enough for their offsets in memory.
BATCH = 1000


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that we use."""

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


def import_tokenizers() -> Any:
    """transformers' loader. Importing it and torch takes minutes from a cold disk."""
    return importlib.import_module("transformers").AutoTokenizer


def load_tokenizer(model_path: str) -> Tokenizer:
    """Load the base model's tokenizer as evaluation does: no remote code, padded with the end token if
    needed."""
    loader = import_tokenizers()
    forbid_remote_code()
    try:
        tokenizer: Tokenizer = loader.from_pretrained(model_path, local_files_only=True)
    except BaseException as error:  # with a foreign folder transformers may raise anything
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise BadModel(f"{model_path} has no tokenizer that can be loaded: {str(error)[:300]}") from error
    if not tokenizer.is_fast:
        raise BadModel(
            f"the tokenizer in {model_path} cannot tell where its tokens lie in the text (not fast)"
        )
    forget_unknown(tokenizer, model_rows(model_path))
    if tokenizer.eos_token_id is None:
        raise BadModel(f"the tokenizer in {model_path} has no end token, which every answer is to end with")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def forget_unknown(tokenizer: Any, rows: float) -> None:
    """Special tokens beyond the model's embedding rows become plain text. transformers 5 adds those of a
    family's class (`<|endoftext|>` to any tokenizer beside a Qwen2 model), which version 4, and with it the
    evaluation of offers, does not: a row that holds one would end the training with an index error."""
    unknown = {token.content for place, token in tokenizer.added_tokens_decoder.items() if place >= rows}
    if not unknown:
        return
    backend = tokenizer.backend_tokenizer
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = [item for item in settings["added_tokens"] if item["content"] not in unknown]
    tokenizer._tokenizer = type(backend).from_str(json.dumps(settings))
    for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        if str(getattr(tokenizer, name, None)) in unknown:
            setattr(tokenizer, name, None)
    log.warning("the model has no rows for %s: read as plain text", ", ".join(sorted(unknown)))


def model_rows(model_path: str) -> float:
    """Return the number of tokens that the model knows: rows of its embeddings."""
    try:
        config = _config(model_path)
    except BadModel:
        return math.inf
    return vocabulary_rows(config) or math.inf


def pad_token_for_engine(tokenizer: Tokenizer) -> str | None:
    """Return `RunInputs.pad_token`: the token to pad with, if the tokenizer lacks one."""
    return tokenizer.pad_token if tokenizer.pad_token_id == tokenizer.eos_token_id else None


def model_window(model_path: str) -> int | None:
    """`max_position_embeddings` as evaluation asks for it: of the loaded configuration, since some families
    name it differently in the file (GPT-2) or rely on a default. Text parts of larger models included."""
    config: Any = _config(model_path)
    try:
        auto = importlib.import_module("transformers").AutoConfig
        config = auto.from_pretrained(model_path, local_files_only=True).to_dict() | config
    except Exception as error:  # noqa: BLE001 - what transformers does not know is read as it stands
        log.warning("%s: its configuration is read as it stands: %s", model_path, str(error)[:200])
    for part in (config, config.get("text_config")):
        for name in WINDOW_NAMES:
            window = part.get(name) if isinstance(part, dict) else None
            if isinstance(window, int) and window > 0:
                return window
    return None


def _config(model_path: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(model_path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{model_path} has no config.json that can be read: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{model_path} has a config.json that holds no object")
    return config


def _is_panic(error: BaseException) -> bool:
    """Return True for a panic in the tokenizer's Rust code: not an `Exception`, and its class cannot be
    imported."""
    return type(error).__name__ == "PanicException"


def tokenized(tokenizer: Tokenizer, texts: Any, **options: Any) -> Any:
    """Call the tokenizer; raise `BadModel` if its own code fails: a regular expression that backtracks for
    too long panics."""
    try:
        return tokenizer(texts, **options)
    except BaseException as error:
        if type(error) is not Exception and not _is_panic(error):
            raise
        raise BadModel(f"the base model's tokenizer fails on the task's rows: {str(error)[:300]}") from error


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, special_tokens: bool = True, limit: int | None = None
) -> Iterator[list[int]]:
    """Encode each text; longer ones are cut at `limit` tokens, special ones included."""
    options: dict[str, Any] = {"add_special_tokens": special_tokens, "return_attention_mask": False}
    if limit is not None:
        options |= {"truncation": True, "max_length": limit}
    for start in range(0, len(texts), BATCH):
        yield from tokenized(tokenizer, list(texts[start : start + BATCH]), **options)["input_ids"]


def encode_filled(tokenizer: Tokenizer, texts: Sequence[str], limit: int | None) -> Iterator[list[int]]:
    """Encode like `encode`, but leave an empty text without tokens, even special ones."""
    filled = encode(tokenizer, [text for text in texts if text], limit=limit)
    yield from (next(filled) if text else [] for text in texts)


#: Labels of what is read and not learned.
IGNORED = -100
Ids = Sequence[int]


def compact_ids(ids: Sequence[int]) -> array[int]:
    """Four bytes a token instead of eight and more: a large task has a hundred million."""
    return array("i", ids)


class LabelledRow(NamedTuple):
    """Instruct and chat: one sequence; `labels` is -100 where nothing is learned."""

    ids: Ids
    labels: Ids


class PairRow(NamedTuple):
    """DPO: two answers to one prompt, cut as the evaluation cuts them."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class PromptRow(NamedTuple):
    """GRPO: a prompt as text, and the extra value that rewards get beside the completion."""

    prompt: str
    extra: Any


Row = LabelledRow | PairRow | PromptRow
