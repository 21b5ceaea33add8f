"""Our reader of weights and our mended configurations before the libraries that will load them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from core.domain.tasks import ImageModelType
from core.submission import metadata
from core.submission.faults import FaultKind
from core.submission.safetensors import BadHeader, read_header
from tests.core.submission.folders import BASE_CONFIG, IMAGE_MODULES, bf16, safetensors
from tests.core.submission.test_check_image_adapter import checked, kinds


def loads(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
    except Exception:
        return False
    return True


def is_read(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            read_header(file)
    except BadHeader:
        return False
    return True


def test_what_the_library_cannot_load_is_never_accepted(tmp_path: Path) -> None:
    good = safetensors(
        {"a": bf16(4, 2), "b": ("F16", [2, 2], b"\0" * 8), "c": ("I8", [3], b"abc")}, {"k": "v"}
    )
    (tmp_path / "good.safetensors").write_bytes(good)
    chance = random.Random(7)
    for number in range(400):
        content = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.choice(b'0123456789[]{},:" \0abF')
        (tmp_path / f"{number}.safetensors").write_bytes(
            content[: len(content) - chance.choice([0, 0, 0, 1])]
        )
    theirs = {path.name: loads(path) for path in sorted(tmp_path.glob("*.safetensors"))}
    ours = {name: is_read(tmp_path / name) for name in theirs}
    assert ours["good.safetensors"]
    assert theirs["good.safetensors"]
    assert [name for name in theirs if ours[name] and not theirs[name]] == []
    assert [name for name in theirs if theirs[name] and not ours[name]] == []


def save(path: Path, modules: list[str], parts: list[str], up: torch.Tensor) -> None:
    tensors = {}
    for module in modules:
        for part in parts:
            is_up = "lora_B" in part or "lora_up" in part
            value = torch.tensor(2.0) if part == "alpha" else up if is_up else torch.randn(2, 4)
            tensors[f"{module}.{part}"] = value.to(torch.bfloat16).clone()
    save_file(tensors, path)


def test_files_of_the_real_library_are_distinguished(tmp_path: Path) -> None:
    for made, facts in IMAGE_MODULES.items():
        family = ImageModelType(made.split()[0])
        for up, found in ((torch.randn(4, 2), []), (torch.zeros(4, 2), [FaultKind.ZERO_DELTA])):
            save(tmp_path / "saved", facts["modules"], facts["parts"], up)
            assert (
                kinds(checked(tmp_path / f"{made} {len(found)}", (tmp_path / "saved").read_bytes(), family))
                == found
            )


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASES = {
    "plain": BASE_CONFIG,
    "scaled": {**BASE_CONFIG, "rope_scaling": SCALED},
    "qwen": {**BASE_CONFIG, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6},
    "neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "max_position_embeddings": 128,
    },
}


def saved(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """As transformers saves it again, and the rotation that it reads there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(folder)
    read.save_pretrained(folder / "saved")
    return json.loads((folder / "saved" / "config.json").read_text()), read.to_dict()["rope_parameters"]


@pytest.mark.parametrize("name", BASES)
def test_a_configuration_that_transformers_saved_and_we_mended_means_the_same(
    tmp_path: Path, name: str
) -> None:
    config = BASES[name]
    theirs, meant = saved(tmp_path / "base", config)
    mended = metadata.restored_config(theirs, config)
    # What an evaluator's older transformers reads, it reads as in the base's own file.
    old = {key: mended.get(key) for key in config if key != "transformers_version"}
    assert old == {key: value for key, value in config.items() if key != "transformers_version"}
    assert not list(metadata.config_faults(mended, config))
    assert saved(tmp_path / "mended", mended)[1] == meant
