"""Little models of the kinds that give trouble: tied, mixed, seeing, and with other tokens than their
tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.trainer import tiny

ROWS = len(tiny.tokenizer())
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 3,
    "pad_token_id": 4,
}


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=ROWS, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=3
    )
    return transformers.GPT2LMHeadModel(config)


def tied() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True))


def mixture() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        )
    )


def fewer_rows() -> Any:
    """Its tokenizer knows a token more than the model, as that of Gemma 3 1B."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def seeing() -> Any:
    """Reads text beside pictures; its folder has no processor for them."""
    text = transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=64)
    eyes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**eyes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def no_padding() -> Any:
    """Its tokenizer names no token to pad with, as those of Llama 3 and Mistral."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**SHAPE, "pad_token_id": None}))


def lfm2() -> Any:
    """Short convolutions between layers with attention."""
    shape = {**SHAPE, "conv_L_cache": 3, "block_multiple_of": 64, "layer_types": ["conv", "full_attention"]}
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**shape))


def falcon_h1() -> Any:
    """Mamba-2 beside the attention of each layer, and a head that is scaled."""
    states = {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32}
    scales = {"lm_head_multiplier": 0.5, "embedding_multiplier": 5.0, "ssm_out_multiplier": 0.5}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SHAPE, **states, **scales))


def granite() -> Any:
    """A head whose logits are divided."""
    scales = {"logits_scaling": 2.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.5}
    config = transformers.GraniteConfig(
        **SHAPE, **scales, attention_multiplier=0.25, tie_word_embeddings=True
    )
    return transformers.GraniteForCausalLM(config)


def minicpm5() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, head_dim=32))


def kanana() -> Any:
    config = transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def nanbeige() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, "pad_token_id": None}))


KINDS = {
    kind.__name__: kind
    for kind in (
        *(gpt2, tied, mixture, fewer_rows, seeing, no_padding),
        *(lfm2, falcon_h1, granite, minicpm5, kanana, nanbeige),
    )
}


def save(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = KINDS[kind]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(2)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer(adds_begin=True, pad=kind != no_padding.__name__)
    if kind == fewer_rows.__name__:
        tokenizer.add_tokens(["<picture>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def with_endless_pattern(folder: Path) -> None:
    """Words are split by a pattern that backtracks beyond its library's limit on a long row of a's."""
    pattern = {"type": "Split", "pattern": {"Regex": "(?:a|aa|aaa)+$(?<=b)"}, "behavior": "Isolated"}
    settings = _settings(folder)
    steps = [{**pattern, "invert": False}, settings["pre_tokenizer"]]
    settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def with_normalizer_bomb(folder: Path) -> None:
    """Each e becomes a quarter of a million, which are searched again and again."""
    doubled = [_replaced("e", "ee")] * 18
    settings = _settings(folder)
    settings["normalizer"] = {"type": "Sequence", "normalizers": [*doubled, *[_replaced("e", "e")] * 2000]}
    (folder / "tokenizer.json").write_text(json.dumps(settings))


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    return settings


def _replaced(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}
