"""Little models and tokenizers made on the spot: a few hundred tokens, two layers, random weights."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = (  # noqa: SIM905 - as a list it fills a page
    "the quick brown fox jumps over a lazy dog while seven wise owls count green apples and red pears "
    "near old river stones under bright moon light user assistant system hello answer question sum of is"
).split()
BEGIN, END, TURN, PAD = "<|begin|>", "<|end|>", "<|im_end|>", "<|pad|>"
SPECIAL = [BEGIN, END, "<|im_start|>", TURN, PAD]
WINDOW = 512


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))


@cache
def _vocabulary() -> str:
    chance = random.Random(0)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator((sentence(chance, chance.randint(5, 30)) for _ in range(2000)), trainer)
    return str(words.to_str())


def tokenizer(*, adds_begin: bool = False, end: str = TURN, pad: bool = True) -> Any:
    """`adds_begin` as Llama's does; Qwen's does not."""
    words = Tokenizer.from_str(_vocabulary())
    if adds_begin:
        words.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, words.token_to_id(BEGIN))]
        )
    more = {"pad_token": PAD} if pad else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=BEGIN, eos_token=end, model_max_length=2048, **more
    )


KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen": (Qwen2Config, Qwen2ForCausalLM)}


def model(
    kind: str = "llama", *, seed: int = 0, window: int = WINDOW, hidden: int = 64, layers: int = 2
) -> Any:
    config, cls = KINDS[kind]
    torch.manual_seed(seed)
    built = cls(
        config(
            vocab_size=len(tokenizer()),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=window,
            bos_token_id=0,
            eos_token_id=3,
            pad_token_id=4,
            tie_word_embeddings=False,
        )
    )
    # As initialised, every token is as likely as any other; this way models differ and have opinions.
    with torch.no_grad():
        for weight in built.parameters():
            if weight.dim() == 2:
                weight.mul_(4)
    return built.eval()


def save(
    folder: Path, kind: str = "llama", *, seed: int = 0, window: int = WINDOW, adds_begin: bool | None = None
) -> Path:
    """A model's folder as a hub repository has it."""
    begins = kind == "llama" if adds_begin is None else adds_begin
    model(kind, seed=seed, window=window).save_pretrained(folder)
    tokenizer(adds_begin=begins).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def instruct_rows(count: int, seed: int = 0, length: int = 8) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "instruct": "sum of " + sentence(chance, chance.randint(1, length)),
            "input": sentence(chance, chance.randint(0, 6)) if chance.random() < 0.6 else "",
            "output": "answer is " + sentence(chance, chance.randint(1, length)),
        }
        for _ in range(count)
    ]


def chat_rows(count: int, seed: int = 0, turns: int = 3) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        talk = [{"from": "system", "value": sentence(chance, 3)}] if chance.random() < 0.3 else []
        for _ in range(chance.randint(1, turns)):
            talk.append({"from": "human", "value": sentence(chance, chance.randint(1, 8))})
            talk.append({"from": "gpt", "value": sentence(chance, chance.randint(1, 8))})
        rows.append({"conversations": talk})
    return rows


def pair_rows(count: int, seed: int = 0, length: int = 8) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "prompt": sentence(chance, chance.randint(1, length)),
            "chosen": "answer is " + sentence(chance, chance.randint(1, length)),
            "rejected": sentence(chance, chance.randint(1, length)),
        }
        for _ in range(count)
    ]


def prompt_rows(count: int, seed: int = 0, length: int = 8) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {"prompt": sentence(chance, chance.randint(1, length)), "extra_data": json.dumps({"k": place})}
        for place in range(count)
    ]
