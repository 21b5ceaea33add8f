"""The fingerprint that validators take of a repository (docs/protocol.md, "model_hash")."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from fnmatch import translate

#: What counts, by path from the repository's root. A star stands for anything but a slash.
PATTERNS = (
    "adapter_model.bin",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.safetensors",
    "model.safetensors",
    "adapter_config.json",
    "config.json",
    "model-*.safetensors",
    "pytorch_model-*.bin",
    "pytorch_model-*.safetensors",
    "checkpoint/last.safetensors",
    "checkpoint/last-*.safetensors",
    "checkpoint/checkpoint-*.safetensors",
    "last-*.safetensors",
    "diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/pytorch_model.bin",
    "text_encoder_2/pytorch_model.bin",
)
_COUNTS = re.compile("|".join(translate(pattern).replace(".*", "[^/]*") for pattern in PATTERNS))


def counts(path: str) -> bool:
    """Whether a file of this path is part of the fingerprint."""
    return _COUNTS.match(path) is not None


def model_hash(files: Mapping[str, tuple[int, str]]) -> str | None:
    """Of paths with size and SHA-256 (hexadecimal) of their content; None where nothing counts. Empty files
    are passed over, as validators do."""
    outer = hashlib.sha256()
    taken = [path for path, (size, _) in files.items() if size and counts(path)]
    for path in sorted(taken):
        outer.update(f"{path}:{files[path][1]}".encode())
    return outer.hexdigest() if taken else None
