"""A little model that a request of a game fits into, with a template that knows tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trainer import tiny

#: Rules, memory, tools and state are a thousand tokens of a usual vocabulary, and three thousand of ours.
WINDOW = 8192


def template(name: str = "qwen_25") -> str:
    from axolotl.utils.chat_templates import get_chat_template

    return str(get_chat_template(name))


def tokenizer(name: str = "qwen_25") -> Any:
    words = tiny.tokenizer()
    words.chat_template = template(name)
    words.model_max_length = WINDOW
    return words


def save(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    tiny.model("qwen", window=WINDOW, hidden=hidden, layers=layers).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def config_only(folder: Path, model_type: str) -> Path:
    """Of a model nothing but what names its family."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder
