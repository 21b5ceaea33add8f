from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from core.submission.model_hash import counts, model_hash

EXACT = [
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
GLOBS = [
    "model-*.safetensors",
    "pytorch_model-*.bin",
    "pytorch_model-*.safetensors",
    "checkpoint/last.safetensors",
    "checkpoint/last-*.safetensors",
    "checkpoint/checkpoint-*.safetensors",
    "last-*.safetensors",
]


def plainly(folder: Path) -> str | None:
    """The rule as docs/protocol.md words it, on a downloaded snapshot."""
    found = {name for name in EXACT if (folder / name).is_file()}
    for pattern in GLOBS:
        found |= {os.path.relpath(path, folder) for path in glob.glob(str(folder / pattern))}
    outer, any_file = hashlib.sha256(), False
    for name in sorted(found):
        content = (folder / name).read_bytes()
        if content:
            any_file = True
            outer.update(f"{name}:{hashlib.sha256(content).hexdigest()}".encode())
    return outer.hexdigest() if any_file else None


NAMES = [
    *EXACT,
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-.safetensors",
    "pytorch_model-1.bin",
    "checkpoint/last.safetensors",
    "checkpoint/last-000004.safetensors",
    "checkpoint/checkpoint-3.safetensors",
    "checkpoints/last.safetensors",
    "last.safetensors",
    "last-1.safetensors",
    "README.md",
    "tokenizer.json",
    "sub/config.json",
    "sub/model-00001-of-00002.safetensors",
    "checkpoint/deep/last-1.safetensors",
    "xmodel.safetensors",
    "model.safetensors.index.json",
    "model-a b\u00fc.safetensors",
]


@given(st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=5), max_size=8))
def test_the_fingerprint_is_what_a_validator_takes_of_the_same_files(
    tmp_path_factory_shared: Path, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory_shared / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    known = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    assert model_hash(known) == plainly(folder)


def test_a_known_value() -> None:
    files = {"config.json": (1, "a" * 64), "adapter_config.json": (1, "b" * 64), "README.md": (1, "c" * 64)}
    text = "adapter_config.json:" + "b" * 64 + "config.json:" + "a" * 64
    assert model_hash(files) == hashlib.sha256(text.encode()).hexdigest()


def test_nothing_that_counts_has_no_fingerprint() -> None:
    assert model_hash({"README.md": (5, "a" * 64), "config.json": (0, "b" * 64)}) is None


def test_a_star_does_not_reach_into_folders() -> None:
    assert counts("model-1.safetensors")
    assert not counts("model-x/y.safetensors")
    assert not counts("a/model.safetensors")
