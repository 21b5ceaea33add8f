"""Make a Llama-style model of a given size, weights at random, for training from scratch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.domain.units import parse_params

#: A head this wide suits every attention kernel.
_HEAD = 64
#: Width for each layer: models of this size that learned best lie between 64 and 128.
_WIDTH_PER_LAYER = 80


def shape_of(params: int, vocabulary: int, length: int) -> dict[str, Any]:
    """Return a configuration with about this many parameters, its tied table of tokens included."""
    best: dict[str, Any] = {}
    smallest_difference = float("inf")
    for width in range(_HEAD, 8192 + 1, _HEAD):
        layers = max(round(width / _WIDTH_PER_LAYER), 2)
        size = _count_parameters(width, layers, vocabulary)
        if abs(size - params) < smallest_difference:
            smallest_difference = abs(size - params)
            best = _config(width, layers, vocabulary, length)
        if size > 2 * params:
            break
    return best


def make_model(folder: Path, params: int, vocabulary: int, length: int) -> None:
    """Write such a model, as transformers loads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(42)
    LlamaForCausalLM(LlamaConfig(**shape_of(params, vocabulary, length))).save_pretrained(folder)


def _config(width: int, layers: int, vocabulary: int, length: int) -> dict[str, Any]:
    heads = width // _HEAD
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
        "intermediate_size": _inner(width),
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
    }


def _inner(width: int) -> int:
    """Two and two thirds of the width, in steps that matrix units like."""
    return -(-width * 8 // 3 // 64) * 64


def _count_parameters(width: int, layers: int, vocabulary: int) -> int:
    heads = width // _HEAD
    shared = (heads // 4 if heads % 4 == 0 else heads) * _HEAD
    layer = 2 * width * width + 2 * width * shared + 3 * width * _inner(width) + 2 * width
    return layers * layer + vocabulary * width + width


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="trainer.native.new_model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", required=True, type=parse_params)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args(list(arguments))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, local_files_only=True)
    make_model(options.folder, options.params, len(tokenizer), options.length)
    tokenizer.save_pretrained(options.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
