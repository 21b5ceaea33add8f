"""A model and a task so small that a laptop trains them in seconds: nothing is downloaded, nothing imported.

The model is a Llama of five layers with random weights and a tokenizer of single bytes. The task is to say a
few words backwards; what a model can learn of it in a minute is how such answers look, which is enough to see
a held-out loss fall.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from math import prod
from random import Random
from typing import Any

MODEL_ID = "god-miner/little-llama"

#: A million parameters: offers that state fewer are not believed.
_WIDTH, _INNER, _LAYERS, _HEADS, _SHARED = 128, 384, 5, 4, 2
_MARKS = ("<s>", "</s>", "<pad>")
_WORDS = ("red", "green", "blue", "one", "two", "three", "apple", "pear", "plum", "near", "far", "old", "new")


def model_files(seed: int = 0) -> dict[str, bytes]:
    """The files of its repository, by name."""
    vocabulary = {**{mark: number for number, mark in enumerate(_MARKS)}}
    for sign in _byte_signs():
        vocabulary[sign] = len(vocabulary)
    shapes = dict(_shapes(len(vocabulary)))
    return {
        "config.json": _json(_config(len(vocabulary))),
        "generation_config.json": _json({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}),
        "tokenizer.json": _json(_tokenizer(vocabulary)),
        "tokenizer_config.json": _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": _MARKS[0],
                "eos_token": _MARKS[1],
                "pad_token": _MARKS[2],
                "model_max_length": 512,
            }
        ),
        "model.safetensors": _weights(shapes, Random(seed)),  # noqa: S311 - random weights, repeatable
    }


def params() -> int:
    return sum(prod(shape) for _, shape in _shapes(len(_MARKS) + 256))


def rows(count: int = 400, seed: int = 0) -> bytes:
    """A dataset as validators send them: one JSON array, every value a string."""
    random = Random(seed)  # noqa: S311 - example data
    made = []
    for _ in range(count):
        words = random.sample(_WORDS, 3)
        made.append({"instruct": f"Backwards: {' '.join(words)}. ", "output": " ".join(reversed(words))})
    return json.dumps(made).encode()


def _shapes(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    shared = _SHARED * _WIDTH // _HEADS
    yield "model.embed_tokens.weight", (vocabulary, _WIDTH)
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", (_WIDTH, _WIDTH)
        yield f"{name}.self_attn.k_proj.weight", (shared, _WIDTH)
        yield f"{name}.self_attn.v_proj.weight", (shared, _WIDTH)
        yield f"{name}.self_attn.o_proj.weight", (_WIDTH, _WIDTH)
        yield f"{name}.mlp.gate_proj.weight", (_INNER, _WIDTH)
        yield f"{name}.mlp.up_proj.weight", (_INNER, _WIDTH)
        yield f"{name}.mlp.down_proj.weight", (_WIDTH, _INNER)
        yield f"{name}.input_layernorm.weight", (_WIDTH,)
        yield f"{name}.post_attention_layernorm.weight", (_WIDTH,)
    yield "model.norm.weight", (_WIDTH,)
    yield "lm_head.weight", (vocabulary, _WIDTH)


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _SHARED,
        "head_dim": _WIDTH // _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def _byte_signs() -> list[str]:
    """The printable sign that stands for each byte in byte-level tokenizers: itself where it is one, else one
    from behind the Latin letters."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    signs, others = [], 0
    for byte in range(256):
        signs.append(chr(byte) if byte in plain else chr(256 + others))
        others += byte not in plain
    return signs


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": mark, **added} for number, mark in enumerate(_MARKS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _weights(shapes: dict[str, tuple[int, ...]], random: Random) -> bytes:
    """A safetensors file in fp32: norms of one, all else a little noise."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content, at = bytearray(), 0
    for name, shape in shapes.items():
        size = prod(shape)
        values = [1.0] * size if len(shape) == 1 else [random.uniform(-0.06, 0.06) for _ in range(size)]
        content += array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * size]}
        at += 4 * size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(content)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
