"""Small submissions of every kind, as engines leave them."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BASE_ID = "tester/Base-1B"
ROWS = 64
BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "vocab_size": ROWS,
    "max_position_embeddings": 128,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
}
#: The same model as transformers 5 saves it.
SAVED_CONFIG: dict[str, Any] = {
    **{key: value for key, value in BASE_CONFIG.items() if key not in ("rope_theta", "torch_dtype")},
    "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "transformers_version": "5.16.1",
}

Tensors = Mapping[str, tuple[str, list[int], bytes]]


def safetensors(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, data = 0, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(content)]}
        at, data = at + len(content), data + content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def bf16(*shape: int, seed: int = 0) -> tuple[str, list[int], bytes]:
    """Healthy weights: small numbers of either sign."""
    raw = bytearray(random.Random(seed).randbytes(2 * math.prod(shape)))
    raw[1::2] = bytes(0x3C | (byte & 0x80) for byte in raw[1::2])
    return "BF16", list(shape), bytes(raw)


def write(folder: Path, files: Mapping[str, bytes | str | dict[str, Any]]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def base(folder: Path) -> Path:
    card = "---\nlicense: apache-2.0\n---\n# Base\n"
    return write(folder, {"config.json": BASE_CONFIG, "README.md": card})


def adapter(folder: Path, seed: int = 0, rank: int = 4) -> Path:
    """What Axolotl leaves after a LoRA run: the local path of the base, a README full of it, a checkpoint."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{layer}.lora_A.weight": bf16(rank, 16, seed=seed),
        f"{layer}.lora_B.weight": bf16(16, rank, seed=seed + 1),
    }
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "/cache/models/tester--Base-1B",
        "revision": "main",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    return write(
        folder,
        {
            "adapter_config.json": config,
            "adapter_model.safetensors": safetensors(weights, {"format": "pt"}),
            "README.md": "---\nbase_model: /cache/models/tester--Base-1B\n---\n/home/me/data.json\n",
            "tokenizer.json": {"version": "1.0"},
            "config.json": SAVED_CONFIG,
            "debug.log": "noise",
            "checkpoint-10/optimizer.pt": b"pickle",
            "checkpoint-10/adapter_model.safetensors": b"half",
        },
    )


def full(folder: Path, parts: int = 1, rows: int = ROWS, seed: int = 0, **changes: Any) -> Path:
    tensors = {
        "model.embed_tokens.weight": bf16(rows, 16, seed=seed),
        "model.layers.0.self_attn.q_proj.weight": bf16(16, 16, seed=seed + 1),
        "model.norm.weight": bf16(16, seed=seed + 2),
        "lm_head.weight": bf16(rows, 16, seed=seed + 3),
    }
    config = {**SAVED_CONFIG, **changes}
    if parts == 1:
        return write(folder, {"config.json": config, "model.safetensors": safetensors(tensors)})
    files: dict[str, Any] = {"config.json": config}
    names, where = list(tensors), {}
    for number in range(parts):
        file = f"model-{number + 1:05}-of-{parts:05}.safetensors"
        mine = names[number::parts]
        files[file] = safetensors({name: tensors[name] for name in mine})
        where.update(dict.fromkeys(mine, file))
    files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": where}
    return write(folder, files)


#: What the real engines wrote of tiny models: by family and engine, the parts of each module and the modules'
#: names, of alike blocks the first.
IMAGE_MODULES: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "image_modules.json").read_text("utf-8")
)
ZERO = ("BF16", [4], bytes(8))


def image_adapter(
    made: str = "sdxl kohya", zero: Callable[[str], bool] = lambda name: False, seed: int = 0
) -> bytes:
    """A whole image adapter with the true names; tensors whose names `zero` picks are zero."""
    facts = IMAGE_MODULES[made]
    names = [f"{module}.{part}" for module in facts["modules"] for part in facts["parts"]]
    return safetensors({name: ZERO if zero(name) else bf16(4, seed=seed) for name in names}, {"format": "pt"})


def image(folder: Path, name: str = "last.safetensors", seed: int = 0) -> Path:
    return write(folder, {name: image_adapter(seed=seed)})


HASHED_NAMES = [
    "adapter_model.bin",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.safetensors",
    "model.safetensors",
    "adapter_config.json",
    "config.json",
    "diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder_2/pytorch_model.bin",
]
HASHED_GLOBS = [
    "model-*.safetensors",
    "pytorch_model-*.bin",
    "pytorch_model-*.safetensors",
    "checkpoint/last.safetensors",
    "checkpoint/last-*.safetensors",
    "checkpoint/checkpoint-*.safetensors",
    "last-*.safetensors",
]


def validators_hash(folder: Path) -> str | None:
    """The rule as docs/publishing.md words it, on a downloaded snapshot."""
    names = {name for name in HASHED_NAMES if (folder / name).is_file()}
    for pattern in HASHED_GLOBS:
        names |= {os.path.relpath(path, folder) for path in glob.glob(str(folder / pattern))}
    contents = {name: content for name in sorted(names) if (content := (folder / name).read_bytes())}
    digests = "".join(f"{name}:{hashlib.sha256(content).hexdigest()}" for name, content in contents.items())
    return hashlib.sha256(digests.encode()).hexdigest() if contents else None
