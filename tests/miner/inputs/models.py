"""Small models as repositories have them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
#: Splits at blanks and knows a few words.
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"},
}


def safetensors(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(256)) * (at // 256) + bytes(at % 256)


WEIGHTS = safetensors({"embed": (512, 64), "layer": (64, 64)})


def model_files(**more: bytes | Path) -> dict[str, bytes | Path]:
    """`model_files(**{"README.md": b"..."})` adds to a small whole model."""
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "model.safetensors": WEIGHTS,
        **more,
    }


def sharded(count: int = 3, each: int = 100) -> dict[str, bytes | Path]:
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    shards = {name: safetensors({f"layer.{n}": (each, 64)}) for n, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": {f"layer.{n}": name for n, name in enumerate(names)}}
    files = model_files(**shards, **{"model.safetensors.index.json": json.dumps(index).encode()})
    del files["model.safetensors"]
    return files
