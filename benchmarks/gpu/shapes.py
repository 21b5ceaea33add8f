"""Models of real shapes with random weights, and rows of random words for them: nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

#: The model's vocabulary is the real one's; the tokenizer knows so many words of it.
WORDS = 2000


class Shape(NamedTuple):
    """A published model's configuration, as transformers names its fields."""

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    keys: int
    vocabulary: int
    tied: bool


SHAPES = {
    "llama-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128_256, False),
    "llama-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128_256, True),
    "qwen-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 151_936, True),
    "tiny": Shape("llama", 64, 128, 2, 4, 2, 2048, False),
}


def shape(name: str, small: bool) -> Shape:
    full = SHAPES[name]
    return full._replace(hidden=64, inner=128, layers=2, heads=4, keys=2, vocabulary=2048) if small else full


def model_folder(root: Path, name: str, small: bool, device: str) -> Path:
    """The model as a hub's folder has it, made where it is not there yet; the weights come from the device,
    whose random numbers are a hundred times as fast as a CPU's."""
    folder = root / f"{name}{'-small' if small else ''}"
    if (folder / "tokenizer.json").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = shape(name, small)
    config = AutoConfig.for_model(
        wanted.kind,
        vocab_size=wanted.vocabulary,
        hidden_size=wanted.hidden,
        intermediate_size=wanted.inner,
        num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.keys,
        max_position_embeddings=8192,
        tie_word_embeddings=wanted.tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(WORDS)}, "t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    )


def rows_file(root: Path, count: int, longest: int, pairs: bool = False) -> Path:
    """Rows as skewed in length as real ones; an answer goes on from its prompt, so that there is something
    to learn. Of a pair the second answer counts down."""
    path = root / f"rows-{count}-{longest}{'-pairs' if pairs else ''}.json"
    if path.exists():
        return path
    chance = random.Random(0)
    made = []
    for _ in range(count):
        length = int(min(max(longest / 4 * chance.lognormvariate(0, 0.6), 8), longest - 4))
        start, prompt = chance.randrange(WORDS), max(length // 4, 2)
        texts = [
            _words(start, 0, prompt, 1),
            _words(start, prompt, length, 1),
            _words(start, prompt, length, -1),
        ]
        names = ("prompt", "chosen", "rejected") if pairs else ("instruct", "output")
        made.append(dict(zip(names, texts, strict=False)))
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


def _words(start: int, at: int, end: int, step: int) -> str:
    return " ".join(f"t{4 + (start + step * place) % (WORDS - 4)}" for place in range(at, end))
