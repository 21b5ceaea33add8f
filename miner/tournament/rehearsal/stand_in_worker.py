"""Runs inside the entry's image, which has torch and transformers: makes a tiny model, or statistics of one.

    python stand_in_worker.py KIND ROWS MODEL STATISTICS ARCHITECTURE

Makes the model if it is not there, of that `model_type`, and the file of statistics.
Standard library, and what the image has; nothing of ours: the rehearsed commit may be any.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Validators sample as many rows.
SAMPLED_ROWS = 2000
END, TURN, START, PAD = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|pad|>"
#: Requests of environments have tools in them, and thousands of letters, each of which may be a token here.
WINDOW, ENVIRONMENT_WINDOW = 512, 16384
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: What an architecture needs besides, to be as small: the layers' kinds, Mamba's sizes, the heads' width.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
        "head_dim": 16,
    },
    "qwen3": {"head_dim": 16},
}
#: Which weights validators put into one group, the first that matches.
GROUPS = (
    ("attention_qkv", r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value|c_attn)\.weight"),
    ("attention_output", r"(o_proj|attn\.c_proj|attention\.dense|out_proj)\.weight"),
    ("ffn_up", r"(up_proj|gate_proj|gate_up_proj|c_fc|dense_h_to_4h|fc1)\.weight"),
    ("ffn_down", r"(down_proj|mlp\.c_proj|dense_4h_to_h|fc2)\.weight"),
    ("embedding", r"(embed_tokens|wte|embed_in)\.weight"),
    ("unembedding", r"(lm_head|embed_out)\.weight"),
    ("layer_norm", r"(norm|ln_\w+)\.weight"),
)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a row, in its order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def make_model(kind: str, rows: Path, folder: Path, architecture: str) -> None:
    """A model of two layers with random weights, and a tokenizer made from the rows."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    window = ENVIRONMENT_WINDOW if kind == "env" else WINDOW
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[END, START, TURN, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator((text for text in texts_of(json.loads(rows.read_bytes()))), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=TURN, pad_token=PAD, model_max_length=max(2048, window)
    )
    if kind == "env":
        tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        **SHAPES.get(architecture, {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(4)  # as initialised, every token would be as likely as any other
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def statistics(kind: str, rows_file: Path, model: Path) -> dict[str, object]:
    """Return the statistics that need no forward pass; validators' `training` and `throughput` are left
    out."""
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    found: dict[str, object] = {"task_type": kind, "weights": {"by_group": weight_groups(model)}}
    if kind != "env":
        found["dataset"] = dataset_block(kind, json.loads(rows_file.read_bytes()), tokenizer)
    return found


def dataset_block(kind: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, object]:
    sample = rows[:: max(1, math.ceil(len(rows) / SAMPLED_ROWS))]
    used: set[int] = set()

    def lengths(*values: Any) -> list[int]:
        """Tokens of each row's part."""
        counts = []
        for value in values:
            ids = tokenizer(" ".join(texts_of(value)), add_special_tokens=False)["input_ids"]
            used.update(ids)
            counts.append(len(ids))
        return counts

    scale = len(rows) / max(len(sample), 1)
    whole = lengths(*[dict(row) for row in sample])
    vocabulary = len(tokenizer)
    block: dict[str, object] = {
        "total_tokens": round(sum(whole) * scale),
        "num_records": len(rows),
        "seq_length_distribution": distribution(whole),
        "vocab_size": vocabulary,
        "unique_tokens_in_data": len(used),
        "vocab_coverage_ratio": len(used) / max(vocabulary, 1),
    }
    prompts = lengths(*[row.get("prompt", row.get("instruct", "")) for row in sample])
    block["prompt_tokens"] = round(sum(prompts) * scale)
    if kind == "dpo":
        chosen = lengths(*[row.get("chosen", "") for row in sample])
        rejected = lengths(*[row.get("rejected", "") for row in sample])
        block |= {
            "chosen_tokens": round(sum(chosen) * scale),
            "rejected_tokens": round(sum(rejected) * scale),
            "chosen_length_distribution": distribution(chosen),
            "rejected_length_distribution": distribution(rejected),
            "chosen_rejected_length_ratio": sum(chosen) / max(sum(rejected), 1),
        }
    elif kind == "grpo":
        block["prompt_length_distribution"] = distribution(prompts)
    else:
        answers = [all_ - prompt for all_, prompt in zip(whole, prompts, strict=True)]
        block["completion_tokens"] = round(sum(answers) * scale)
        block["completion_length_distribution"] = distribution(answers)
    return block


def distribution(lengths: Sequence[int]) -> dict[str, float]:
    ordered = sorted(lengths) or [0]

    def at(share: float) -> float:
        return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": float(ordered[-1])}


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name)), "other")


def weight_groups(model: Path) -> dict[str, dict[str, float]]:
    """Root mean square, norm and largest value of each group, tensor by tensor."""
    safe_open = importlib.import_module("safetensors").safe_open
    sums: dict[str, tuple[float, int, float]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name).float()
                square, count, most = sums.get(group_of(name), (0.0, 0, 0.0))
                largest = float(tensor.abs().max()) if tensor.numel() else 0.0
                square += float((tensor.double() ** 2).sum())
                sums[group_of(name)] = (square, count + tensor.numel(), max(most, largest))
    return {
        group: {
            "weight_rms": math.sqrt(square / max(count, 1)),
            "weight_norm": math.sqrt(square),
            "max_abs": most,
        }
        for group, (square, count, most) in sorted(sums.items())
    }


def main(arguments: Sequence[str]) -> int:
    kind, rows, model, target = arguments[0], *map(Path, arguments[1:4])
    if not model.exists():
        make_model(kind, rows, model, arguments[4])
    target.write_text(json.dumps(statistics(kind, rows, model), indent=2), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
