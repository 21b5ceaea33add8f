"""Check a folder as a stranger to this project would: with plain safetensors, transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open


class Faulty(Exception):
    """Problem of a folder."""


def whole(folder: Path) -> None:
    """Every JSON parses, every tensor can be read to its last byte, and nothing is there that does not
    belong."""
    try:
        names = sorted(path.name for path in folder.iterdir())
        _known(names)
        for name in names:
            path = folder / name
            if name.endswith(".json"):
                json.loads(path.read_text("utf-8"))
            elif name.endswith(".safetensors"):
                _read(path)
    except Faulty:
        raise
    except Exception as error:
        raise Faulty(f"{type(error).__name__}: {error}") from error


def _known(names: list[str]) -> None:
    adapter = {"adapter_config.json", "adapter_model.safetensors"} <= set(names)
    full = "config.json" in names and any(
        name.startswith("model") and name.endswith(".safetensors") for name in names
    )
    strange = [name for name in names if name.startswith(".") or not name.endswith(_ENDINGS)]
    if adapter is full or strange:
        raise Faulty(f"neither adapter nor model, or more than one: {', '.join(names) or 'nothing'}")


_ENDINGS = (".json", ".safetensors", ".md", ".model", ".txt", ".jinja")


def _read(path: Path) -> None:
    with safe_open(path, "pt") as opened:
        keys = list(opened.keys())
        if not keys:
            raise Faulty(f"{path.name} holds no tensor")
        for key in keys:
            opened.get_tensor(key)


def load(folder: Path, base: Path) -> Any:
    """The model, after it has said one finite thing."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    whole(folder)
    try:
        if (folder / "adapter_config.json").is_file():
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    except Exception as error:
        raise Faulty(f"{type(error).__name__}: {error}") from error
    if not bool(torch.isfinite(logits).all()):
        raise Faulty("its first answer is NaN")
    return model
